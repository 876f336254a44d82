"""Communication between ranks. Code outside of this folder does not call torch's collectives itself (DTensor and
Distributed Checkpoint do), and does not branch on the backend.

lanes          ordered communication queues, which run during the computation
collectives    the collectives that lanes run, and blocking ones
backends       the choice of a transport for a group and a device
transport      the protocol of a transport, and its capabilities
gloo/          the transport of direct sends over gloo
builtin        the transport that uses the collectives of NCCL or any other backend
groups         process groups, channels and tags
agreement      exchanges of a few integers over gloo, by which all ranks reach the same decision
priority       delays some lanes so that more urgent communication starts first
transfers      transfers on the CPU, which start at once or on a thread later
streams        the order of a device's work
watch/         the hang detector
ranges         named ranges for profilers, and intervals for a timeline
"""
