"""Which families the tests have probed: `plan` need not load torch to know that they convert."""

# model_type -> probed by tests/students/test_probe.py on the class of the installed transformers
PROBED = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "olmo2",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gpt_neox",
    "gpt2",
    "smollm3",
    "granite",
)
