"""Text into HTML: every string that a model, a recipe or a prompt supplied passes through `text`."""

import base64
import hashlib
import html
import re
from collections.abc import Sequence
from pathlib import Path

TEMPLATE = Path(__file__).with_name("page_template.html")

# Characters that reorder, hide or break lines without being seen: shown by their code instead.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
    "|[\U000e0000-\U000e007f]"
)


def visible(value: object) -> str:
    """Return the text with unseen and direction-changing characters written as ⟨U+202E⟩."""
    return _UNSEEN.sub(lambda m: f"⟨U+{ord(m[0]):04X}⟩", str(value))


def text(value: object) -> str:
    """Return the text escaped for element content and for quoted attributes."""
    return html.escape(visible(value), quote=True)


def tag(name: str, inner: str, cls: str = "", **attributes: str) -> str:
    """Return one element; `inner` is HTML already, attribute values are escaped here."""
    given = {"class": cls, **attributes} if cls else attributes
    written = "".join(f' {key}="{text(value)}"' for key, value in given.items())
    return f"<{name}{written}>{inner}</{name}>"


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Return a definition list; the values are HTML already, pairs without one are left out."""
    return tag("dl", "".join(tag("dt", text(k)) + tag("dd", v) for k, v in pairs if v), "facts")


def section(title: str, inner: str, lead: str = "") -> str:
    return tag("section", tag("h2", text(title)) + (tag("p", text(lead), "lead") if lead else "") + inner)


def page(title: str, body: str) -> str:
    """Return the whole page. Only the template's own style and script may run: their hashes are the policy.

    Args:
        title: plain text.
        body: HTML.
    """
    template = TEMPLATE.read_text(encoding="utf-8")
    style, script = (_hash(re.search(f"<{t}>(.*?)</{t}>", template, re.S)[1]) for t in ("style", "script"))
    policy = (
        f"default-src 'none'; style-src {style}; script-src {script}; base-uri 'none'; form-action 'none'; "
        "img-src 'none'; connect-src 'none'; frame-src 'none'; object-src 'none'"
    )
    slots = {"csp": policy, "title": text(title), "body": body}
    # One pass: what a slot brings in is never searched for slots.
    return re.sub(r"\{\{(\w+)\}\}", lambda m: slots[m[1]], template)


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
