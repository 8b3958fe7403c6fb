//! Sleeping until a queue pair's interrupt comes, without missing it.

use base::{Dma, Doorbell};

use crate::queue_pair::QueuePair;

/// Whether a thread may sleep on a queue pair's interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Armed {
    /// Nothing is there; whatever comes from now on signals the vector.
    Armed,
    /// Something is there already, and its signal may have been taken: poll once more.
    WorkPending,
}

/// Gets ready to sleep: takes back the signals so far with `clear` (reading the event descriptor of
/// the vector), and then looks at the ring once more.
///
/// In the other order a completion that comes between the look and the clearing would be slept
/// over: its signal is taken away, and nobody looks again.
pub fn arm<D: Dma, B: Doorbell>(queue: &mut QueuePair<D, B>, clear: impl FnOnce()) -> Armed {
    clear();
    if queue.arm() { Armed::Armed } else { Armed::WorkPending }
}
