"""Checkpoints on the disk: folders of torch.distributed.checkpoint's, read without running any code
that is in them.

In: a folder with `.metadata` and `.distcp` files, from `oper.save` or of torch's alone. Out: its
tensors, by name and by rows; findings; the checkpoint for another number of ranks; a table in one
file. Imports: files and base.
"""
