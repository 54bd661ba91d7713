"""Between text and tokens: tokenizer, chat templates, detokenizer, stop strings."""
