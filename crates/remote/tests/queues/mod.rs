//! I/O queues of a host.

use std::sync::Mutex;

use base::Instant;
use nvme::{Event, QueuePairOptions, QueueSizes, Techniques};
use target::tcp::Guest;
use tenmil_remote::{Remote, RemoteQueue};

use crate::net::later;

/// Makes a queue of this depth over namespace 1. It moves the time on.
pub(crate) fn make(
    remote: &mut Remote,
    guests: &Mutex<Vec<Guest>>,
    depth: u32,
    now: &mut Instant,
) -> RemoteQueue {
    let options = QueuePairOptions { depth, vector: None, techniques: Techniques::default() };
    let id = remote.controller().create_queue_pair(later(guests, now), options).unwrap();
    while remote.poll(later(guests, now)) != Some(Event::QueuePairCreated { id }) {}
    remote.take_queue(id, 1, QueueSizes::default()).unwrap()
}
