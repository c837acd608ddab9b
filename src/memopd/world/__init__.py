"""The embedded default: an invented encyclopedia, its questions and tokenizer, an oracle and its demonstrations."""
