"""How bytes move. Nothing above this room calls a collective or names a backend.

lanes          ordered queues of communication beside the computation
collectives    what lanes run, and what waits at once
backends       which transport moves what
transport      the protocol of a transport, and its capabilities
gloo/          direct sends
builtin        the collectives of NCCL, and of any other backend
groups         process groups, channels and tags
transfers      transfers on the CPU that begin when something else has ended
streams        the order of a device's work
watch/         the detector of hangs, and what ranks agree on
timeline       when communication ran
ranges         names in a profile
"""
