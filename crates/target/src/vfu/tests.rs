//! A device over a Unix socket, and clients that speak the protocol to it by hand.

mod rig;
mod slow;

mod ends;
mod exchange;
mod interop;
mod latency;
mod memory;
