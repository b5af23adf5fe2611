"""Make a Hugging Face folder of SmolLM2's GGUF file: python from_gguf.py FILE FOLDER"""

import sys
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

file, folder = map(Path, sys.argv[1:])
model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
if quantizer := getattr(model, "hf_quantizer", None):  # which refuses to save, even float32
    quantizer.remove_quantization_config(model)
model.save_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
digits = pre_tokenizers.Digits(individual_digits=True)  # as llama.cpp splits for `smollm`
words = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
tokenizer.save_pretrained(folder)
