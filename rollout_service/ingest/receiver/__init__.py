"""The receiver process: a rank of a trainer's group that receives its broadcasts.

    receiver.py  in the ingest: starts and kills the process, requests tensors from it, and forwards batches
    process.py   the main loop of the process, and the messages between both
    links.py     one broadcast over NCCL, or over gloo if the ingest has no GPU

It is a separate process because a collective cannot be cancelled. If a trainer dies within a broadcast, the other rank
waits forever, and only killing that rank ends it.

Tensors are not written to parts, unlike those of an upload: an upload knows its whole table before the first byte,
while a trainer may announce a broadcast tensor by tensor. The process fills shared memory, and the ingest converts
tensors from there and gives the memory back. A version of any size thus needs 512 MiB, or the size of its largest
tensor. If a trainer broadcasts faster than the ingest converts, the broadcast itself blocks the trainer. The
disadvantage: after a restart of the ingest, the trainer must join and broadcast again.

A tensor is copied once: from the buffer of the broadcast into the shared memory, where the quantizer reads it.
"""
