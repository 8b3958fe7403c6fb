//! Quiesced LBA ranges: for resizing and draining a device, and for an atomic compare-and-write.
//!
//! ```text
//!   quiescing thread                       a channel
//!   ----------------                       ---------
//!   enters the range, bumps `attention`    stores how much it has in flight
//!   barrier, heavy half                    barrier, light half
//!   loads what each has in flight          loads `attention`; if it changed, reads the ranges
//! ```
//!
//! Either the channel's load is late enough to see the range, or the quiescing thread sees in flight what
//! the channel is about to submit, and waits for it. So a channel pays one load a batch, and an idle
//! channel is not involved.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use tenmil_base::{Operation, Request, Span};
use tenmil_linux::EventFdVectors;
use tenmil_linux::named_thread::sleep;

use crate::bdev::BdevShared;

/// A quiesced range of blocks, until it is dropped. No channel but the exempted one accepts requests that
/// overlap it; later requests of the same batch wait with them, which preserves the order. A flush
/// overlaps every range.
#[derive(Debug)]
pub struct QuiescedRange {
    pub(crate) shared: Arc<BdevShared>,
    pub(crate) held: QuiesceEntry,
    /// Value of `attention` when the range was entered.
    pub(crate) generation: u64,
}

/// Error: a range did not drain in time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuiesceTimeout {
    /// Name of the device.
    pub device: String,
    /// The range.
    pub blocks: Range<u64>,
    /// Time waited.
    pub waited: Span,
    /// Holders that still had requests in flight there.
    pub busy: Vec<String>,
}

/// An entry of the device's table of quiesced ranges, in order of creation.
#[derive(Clone, Debug)]
pub(crate) struct QuiesceEntry {
    pub(crate) id: u64,
    pub(crate) blocks: Range<u64>,
    /// The exempted channel.
    pub(crate) except: Option<u32>,
    /// Raised when a channel has drained.
    pub(crate) waker: EventFdVectors,
}

/// A range of blocks that a request accesses; a request has at most two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestRanges {
    pub(crate) first: u64,
    pub(crate) blocks: u64,
}

/// Interval of unprompted checks: a channel that becomes idle before it has seen the range does not raise
/// the waker.
const NAP_MAX: Span = Span::from_ms(2);

impl QuiescedRange {
    /// Whether the range has drained: no channel has an overlapping request in flight, and no earlier
    /// quiesced range overlaps. Once true, it stays true until the range is dropped.
    ///
    /// Never blocks, so that a thread that also runs channels can call it between iterations.
    pub fn has_drained(&self) -> bool {
        self.shared.check_drained(&self.held, self.generation).is_ok()
    }

    /// The range.
    pub fn blocks(&self) -> Range<u64> {
        self.held.blocks.clone()
    }

    /// Waits until the range has drained. Must not be called on a thread that runs channels: it would
    /// deadlock.
    pub(crate) fn wait_until_drained(&self, at_most: Span) -> Result<(), QuiesceTimeout> {
        let clock = self.shared.options.clock;
        let began = clock.now();
        loop {
            // Armed before the check, so that a channel that drains after it wakes this thread.
            let is_heard = self.held.waker.unmask(0);
            let Err(busy) = self.shared.check_drained(&self.held, self.generation) else {
                return Ok(());
            };
            let waited = clock.now().since(began);
            if waited >= at_most {
                let device = self.shared.name.clone();
                return Err(QuiesceTimeout { device, blocks: self.blocks(), waited, busy });
            }
            let nap = Span { ns: at_most.ns - waited.ns }.min(NAP_MAX);
            if !is_heard || self.held.waker.wait_for_signal(0, nap).is_err() {
                sleep(nap);
            }
        }
    }
}

impl Drop for QuiescedRange {
    fn drop(&mut self) {
        self.shared.release_quiesced(self.held.id);
    }
}

impl RequestRanges {
    /// Every block.
    pub(crate) const EVERYTHING: Self = Self { first: 0, blocks: u64::MAX };

    /// The ranges that `request` accesses: its blocks and the source of a copy.
    pub(crate) fn of_request(request: &Request) -> [Self; 2] {
        let blocks = u64::from(request.blocks);
        let target = match request.operation {
            Operation::Flush => Self::EVERYTHING,
            _ => Self { first: request.lba, blocks },
        };
        let source = match request.operation {
            Operation::Copy => Self { first: request.operand, blocks },
            _ => target,
        };
        [target, source]
    }

    pub(crate) const fn overlaps(self, range: &Range<u64>) -> bool {
        self.first < range.end && range.start < self.first.saturating_add(self.blocks)
    }
}

impl QuiesceEntry {
    /// Whether a channel must hold a request: the oldest overlapping range decides.
    pub(crate) fn blocks_request(
        holds: &[Self],
        channel: u32,
        touched: [RequestRanges; 2],
    ) -> bool {
        let overlaps = |held: &&Self| touched.iter().any(|part| part.overlaps(&held.blocks));
        holds.iter().find(overlaps).is_some_and(|held| held.except != Some(channel))
    }
}

impl fmt::Display for QuiesceTimeout {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, blocks, waited, busy } = self;
        let Range { start, end } = blocks;
        write!(
            out,
            "quiesce {device} blocks {start} to {end}: after {waited} {} still had requests there \
             in flight, expected none",
            busy.join(", ")
        )
    }
}

impl std::error::Error for QuiesceTimeout {}
