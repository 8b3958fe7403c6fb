//! I/O queues of a host.

use std::sync::Mutex;

use tenmil_base::Instant;
use tenmil_nvme_fabrics::{FabricsChannel, FabricsController};
use tenmil_nvme_host::{Event, FastPathOptions, QueuePairOptions, QueueSizes};
use tenmil_serve::tcp::TargetConnection;

use crate::net::later;

/// Makes a queue of this depth over namespace 1. It moves the time on.
pub(crate) fn make(
    remote: &mut FabricsController,
    guests: &Mutex<Vec<TargetConnection>>,
    depth: u32,
    now: &mut Instant,
) -> FabricsChannel {
    let options = QueuePairOptions { depth, vector: None, techniques: FastPathOptions::default() };
    let id = remote.controller().create_queue_pair(later(guests, now), options).unwrap();
    while remote.poll(later(guests, now)) != Some(Event::QueuePairCreated { id }) {}
    remote.take_queue(id, 1, QueueSizes::default()).unwrap()
}
