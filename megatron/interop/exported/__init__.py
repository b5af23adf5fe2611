"""Sources of the model that an export carries with it; they import transformers."""
