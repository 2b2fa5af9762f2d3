"""A teacher's licence: read from its card, and in the way where it asks something that the recipe does not acknowledge."""

import pytest

from fewstep.errors import UserError
from fewstep.teachers.config import TeacherConfig
from fewstep.teachers.licences import check_licence, read_licence
from fewstep.teachers.load import licence


def card(header: str) -> str:
    return f"---\n{header}\n---\n# A model\n"


@pytest.mark.parametrize(
    "header, name, asks",
    [
        ("license: apache-2.0", "apache-2.0", None),
        ("license: MIT", "mit", None),
        ("license: cc-by-nc-4.0", "cc-by-nc-4.0", "no commercial use"),
        ("license: llama3.1", "llama3.1", "Llama at the beginning"),
        ("license: llama3", "llama3", "may not improve any other"),
        ("license: [gemma]", "gemma", "restrictions pass on"),
        (
            "license: other\nlicense_name: qwen-research\nlicense_link: https://x/y",
            "qwen-research",
            "research use alone",
        ),
        ("license: other\nlicense_name: acme", "acme", "its own conditions"),
        ("license: other\nlicense_name: llama3.3", "llama3.3", "Llama at the beginning"),
        ("license: cc-by-4.0", "cc-by-4.0", None),
        ("license: bigcode-openrail-m", "bigcode-openrail-m", "pass on"),
        ("license: apple-amlr", "apple-amlr", "research"),
        ("license: fair-noncommercial-research-license", "fair-noncommercial-research-license", "no commercial"),
        ("tags: [x]", None, None),
        ("license: [", None, None),  # no YAML
    ],
)
def test_licences_and_what_they_ask(header, name, asks):
    found = read_licence(card(header))
    assert found.name == name
    assert (asks is None) == (found.conditions is None) and (asks or "") in (found.conditions or "")


def test_conditions_stop_a_run_until_they_are_acknowledged_by_name():
    strict = read_licence(card("license: other\nlicense_name: qwen-research\nlicense_link: https://x/y"))
    for said in (None, "yes", "apache-2.0"):
        with pytest.raises(UserError) as caught:
            check_licence(TeacherConfig(model="m", acknowledge=said), strict)
        assert "set teacher.acknowledge: qwen-research" in str(caught.value) and "https://x/y" in str(caught.value)
    check_licence(TeacherConfig(model="m", acknowledge=" Qwen-Research "), strict)
    check_licence(TeacherConfig(model="m"), read_licence(None))  # nothing is stated: nothing to acknowledge
    check_licence(TeacherConfig(model="m"), read_licence(card("license: apache-2.0")))


def test_a_folders_card_and_a_gguf_header_state_the_licence(tmp_path):
    import struct

    from tiny import save_tiny

    folder = save_tiny(tmp_path / "teacher")
    assert licence(TeacherConfig(model=str(folder))).name is None
    (folder / "README.md").write_text(card("license: gemma"))
    assert licence(TeacherConfig(model=str(folder))).name == "gemma"
    text = lambda s: struct.pack("<Q", len(s)) + s.encode()  # noqa: E731
    fields = {"general.architecture": "llama", "general.license": "cc-by-nc-4.0"}
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields))
    header += b"".join(text(key) + struct.pack("<I", 8) + text(value) for key, value in fields.items())
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "m.gguf").write_bytes(header)
    assert licence(TeacherConfig(model=str(tmp_path / "alone" / "m.gguf"))).conditions == "no commercial use"
