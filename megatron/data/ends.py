"""The token that ends every document: what keeps documents apart relies on it."""

from collections.abc import Sequence

from megatron.data.inspect.pick import end_of_documents
from megatron.data.tokens import TokenFile
from megatron.errors import UserError


def check_ends(key: str, files: Sequence[TokenFile], end: int | None) -> None:
    """UserError where the documents of a file do not all end with the tokenizer's token for it.

    key: the configuration's key that needs it; end: that token, None where it is not known
    """
    for tokens in files:
        if end is None:
            raise UserError(
                f"{key}: nothing says which token ends a document of {tokens.prefix} - set"
                " tokenizer_type and vocab_file to what the data was prepared with, or prepare it"
                f" again; or set {key}: false"
            )
        if end_of_documents(tokens) != end:
            raise UserError(
                f"{key}: the documents of {tokens.prefix} do not end with token {end}, the"
                " tokenizer's end of a document, so it is not known where they lie - prepare the"
                f" text again with prepare_data.py, which ends each; or set {key}: false"
            )
