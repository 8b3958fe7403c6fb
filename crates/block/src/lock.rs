//! Ranges of blocks that are kept still: what quiesces a device, and what makes a compare and a write
//! one step.
//!
//! ```text
//!   who holds                              a channel
//!   ---------                              ---------
//!   enters the range, bumps `attention`    says how much it has in flight
//!   barrier, heavy half                    barrier, light half
//!   looks at what each has in flight       loads `attention`; if it is new, looks at the ranges
//! ```
//!
//! Either the load comes late enough to see that there is a range, or what the channel is about to
//! submit is seen in flight and waited for. So a channel pays one load a batch for it, and one that
//! rests is not asked at all.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use base::{Operation, Request, Span};
use host::EventVectors;
use host::thread::rest;

use crate::device::Shared;

/// A range of blocks that is kept still until this is dropped. Requests that touch it are not taken
/// by any channel but the one that is excepted; what is behind them in the same batch waits with
/// them, so that the order stays. A flush touches every block.
#[derive(Debug)]
pub struct Hold {
    pub(crate) shared: Arc<Shared>,
    pub(crate) held: Held,
    /// What `attention` was when the range was entered.
    pub(crate) generation: u64,
}

/// A range did not become still in time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotStill {
    /// The device.
    pub device: String,
    /// The blocks.
    pub blocks: Range<u64>,
    /// How long was waited.
    pub waited: Span,
    /// Who still had requests there in flight.
    pub busy: Vec<String>,
}

/// A range in the table of the device: in the order in which they came.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) id: u64,
    pub(crate) blocks: Range<u64>,
    /// The channel that may go on.
    pub(crate) except: Option<u32>,
    /// Rung when a channel has become quiet.
    pub(crate) bell: EventVectors,
}

/// What a request touches: at most two ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Touched {
    pub(crate) first: u64,
    pub(crate) blocks: u64,
}

/// How long to wait before looking again unasked: a channel that becomes idle before it has heard of
/// the hold tells nobody.
const NAP_MAX: Span = Span::from_ms(2);

impl Hold {
    /// Whether nothing else touches the range any more: no channel has an overlapping request in
    /// flight, and no earlier hold overlaps. Once true, it stays so until the hold is dropped.
    ///
    /// Never blocks, so a thread that also turns channels asks between turns.
    pub fn is_still(&self) -> bool {
        self.shared.is_still(&self.held, self.generation).is_ok()
    }

    /// The blocks.
    pub fn blocks(&self) -> Range<u64> {
        self.held.blocks.clone()
    }

    /// Waits until the range is still. Not for a thread that turns channels: it would wait for
    /// itself.
    pub(crate) fn wait(&self, at_most: Span) -> Result<(), NotStill> {
        let clock = self.shared.options.clock;
        let began = clock.now();
        loop {
            // Before the look, so that whoever becomes quiet after it is heard.
            let is_heard = self.held.bell.unmask(0);
            let Err(busy) = self.shared.is_still(&self.held, self.generation) else {
                return Ok(());
            };
            let waited = clock.now().since(began);
            if waited >= at_most {
                let device = self.shared.name.clone();
                return Err(NotStill { device, blocks: self.blocks(), waited, busy });
            }
            let nap = Span { ns: at_most.ns - waited.ns }.min(NAP_MAX);
            if !is_heard || self.held.bell.wait(0, nap).is_err() {
                rest(nap);
            }
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.shared.release(self.held.id);
    }
}

impl Touched {
    /// Every block there is.
    pub(crate) const EVERYTHING: Self = Self { first: 0, blocks: u64::MAX };

    /// What `request` touches, and the source of a copy.
    pub(crate) fn by(request: &Request) -> [Self; 2] {
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

impl Held {
    /// Whether a channel has to stay away from what a request touches: the oldest range that
    /// overlaps decides.
    pub(crate) fn keeps_away(holds: &[Self], channel: u32, touched: [Touched; 2]) -> bool {
        let overlaps = |held: &&Self| touched.iter().any(|part| part.overlaps(&held.blocks));
        holds.iter().find(overlaps).is_some_and(|held| held.except != Some(channel))
    }
}

impl fmt::Display for NotStill {
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

impl std::error::Error for NotStill {}
