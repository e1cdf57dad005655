"""The process that is a rank of a trainer's group and takes what the trainer broadcasts.

    receiver.py  in the ingest: starts the process, tells it what to receive, hands batches on, kills it
    process.py   what the process does
    links.py     how it takes one broadcast: NCCL, or gloo where the ingest has no GPU
    shared_memory.py  the memory that both share
    messages.py  what they say to each other

It is a process of its own because a collective cannot be cancelled: a trainer that dies in the middle leaves the other
rank waiting for ever, and only killing that rank ends it.

Tensors are not written to parts, as those of an upload are: an upload knows its whole table before the first byte, and
a trainer may announce a broadcast tensor by tensor. They are converted as they come, from memory that the process fills
and the ingest gives back, so that a version of any size needs 512 MiB of it, or its largest tensor; a trainer that
broadcasts faster than the ingest converts is held by the broadcast itself. What is lost is what parts are for: after a
restart of the ingest the trainer joins and broadcasts again.

A tensor is copied once on its way: from the memory that the group received it in to the shared memory, where the
quantizer reads it.
"""
