"""From a user's files to batches: sources -> conversations -> tokens and masks -> batches, with a ledger of what became of every row.

Each step is one file. Which files: `files`, `hub`. Their rows: `read`, `read_texts`, `read_tables`. What a row says: `conversations`,
`turns`, `ids`; all files of a setting: `sources`. Turns to tokens and trained spans: `template`, `tool_template`; the same without a
template: `plain`; many rows, in parallel: `tokenize`. One source in tokens, kept: `source_tokens`, `fingerprint`, `cache`. Choosing among
tokens without a copy: `flat`, `dataset`, `mix`, `pack`; on the disk, too: `on_disk`. All of this in call order: `prepare`; for other
processes: `handoff`. Optimizer steps of one rank: `order`, `batches`. What a person looks at: `ledger`, `show`. Import from those files:
this one imports nothing, so that a first look at a data file needs neither torch nor transformers.
"""
