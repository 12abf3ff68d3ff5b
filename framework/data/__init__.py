"""From a user's files to batches: sources -> conversations -> tokens and masks -> batches, with a ledger of what became of every row.

Each step is one file: `files` (which files), `read`, `read_texts` and `read_tables` (their rows), `conversations` and `turns` (what a row
says), `sources` (all files of a setting, first look), `template` and `tool_template` (turns to tokens and trained spans), `plain` (the same
for text without a template), `tokenize` (many rows, in parallel), `dataset` (flat arrays), `prepare` (all of the above in call order),
`order` and `batches` (optimizer steps of one rank), `ledger` and `show` (what a person looks at). Import from those files: this one
imports nothing, so that a first look at a data file needs neither torch nor transformers.
"""
