//! Tests of both ends against the specification, against each other, and against misbehaving peers.

mod digests;
mod fragmentation;
mod invalid_pdus;
mod limits;
mod parameter_combinations;
mod response_batching;
mod test_pair;
mod timeouts;
mod wire_bytes;
