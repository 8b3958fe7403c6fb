//! Who is connected, for people and programs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::seat::{Seat, Shown};

/// A connection that a service has.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) seat: Arc<Seat>,
    pub(super) peer: String,
    pub(super) port: u16,
    /// Bytes of the budget that it has.
    pub(super) held: Arc<AtomicU64>,
}

/// One connection, as it is just now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionSample {
    /// Its number, which is never used again.
    pub id: u64,
    /// Who.
    pub peer: String,
    /// By which port of the service it has come.
    pub port: u16,
    /// The host's NVMe Qualified Name, once it is known.
    pub host: Option<String>,
    /// The subsystem's.
    pub subsystem: Option<String>,
    /// The controller's number.
    pub cntlid: Option<u16>,
    /// Which queue it is: 0 is the admin queue.
    pub queue: Option<u16>,
    /// Whether a digest follows each header.
    pub header_digest: bool,
    /// Whether a digest follows all data.
    pub data_digest: bool,
    /// Bytes of the budget that it has, used or not.
    pub memory_bytes: u64,
    /// The number of the reactor that turns it.
    pub reactor: Option<u32>,
}

impl Known {
    pub(super) fn sample(&self, id: u64) -> ConnectionSample {
        let Shown { header_digest, data_digest, queue } = self.seat.shown().clone();
        ConnectionSample {
            id,
            peer: self.peer.clone(),
            port: self.port,
            host: queue.as_ref().map(|queue| queue.host.clone()),
            subsystem: queue.as_ref().map(|queue| queue.subsystem.clone()),
            cntlid: queue.as_ref().map(|queue| queue.cntlid),
            queue: queue.as_ref().map(|queue| queue.qid),
            header_digest,
            data_digest,
            memory_bytes: self.held.load(Ordering::Relaxed),
            reactor: self.seat.reactor(),
        }
    }
}
