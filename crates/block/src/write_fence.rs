//! Fences: blocks that are closed to every channel of a device because a client was lost with writes in
//! flight there.
//!
//! ```text
//!   old client     write A ──────────────── in the device ───────────────▶ completed
//!                     │ lost: fence_writes()                                  │ fence removed
//!   new client        └────── write B of the same blocks waits ───────────────┴─▶ submitted
//!                                              or, after WAIT_MAX, completes INTERRUPTED
//! ```
//!
//! The completion of A is no longer delivered to any client, so the submitter of B assumes that A is done
//! or lost. If B started before A ended, A could overwrite B.
//! Reads wait as well: the data they return could still change without a write known to any client.
//!
//! Blocks are closed rather than clients rejected, because B may come from another host, another path of
//! the same host, or another protocol. A device that never completes A costs those blocks, not the whole
//! device.
//! A fence is an entry in the table of its device and is found as quiesced ranges are: see
//! [`quiesce`](crate::quiesce). Without fences, a request pays nothing.

use core::ops::Range;

use tenmil_base::{Instant, Request, Segment, Span};

/// A fenced set of blocks.
#[derive(Clone, Debug)]
pub(crate) struct WriteFence {
    /// Identifies the client; several fences may have the same id.
    pub(crate) id: u64,
    pub(crate) blocks: Range<u64>,
}

/// A request that waits until its blocks are open again.
#[derive(Debug)]
pub(crate) struct FencedRequest {
    /// Its segment indices count from the first entry of `segments`.
    pub(crate) request: Request,
    pub(crate) segments: Box<[Segment]>,
    pub(crate) until: Instant,
}

/// Maximum wait of a request for a fence. It is below the 30 s command timeout of hosts, so that they get
/// a completion and retry.
pub(crate) const WAIT_MAX: Span = Span::from_secs(5);
