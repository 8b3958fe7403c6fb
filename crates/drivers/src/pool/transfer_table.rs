//! Data transfers of a channel between its memory and the devices, and their results until they are
//! reported to the pool.

use tenmil_base::{IoStatus, Segment};
use tenmil_volume::{ActionResult, Pool};

use super::bounce_memory::BounceMemory;

/// The transfers of a channel. Their index is the token of the device request.
pub(super) struct TransferTable {
    /// Of each, the pool's id, and its part of the bounce memory if data has checksums.
    in_flight: Vec<Option<(u64, Segment)>>,
    free: Vec<u32>,
    ended: Vec<CompletedTransfer>,
    /// Checksums of ended transfers, in order.
    sums: Vec<u32>,
}

/// An ended transfer and its number of checksums.
#[derive(Clone, Copy, Debug)]
struct CompletedTransfer {
    io: u64,
    status: IoStatus,
    sums: usize,
}

impl TransferTable {
    /// An empty table with capacity for `count` transfers.
    pub(super) fn with_capacity(count: usize) -> Self {
        Self {
            in_flight: Vec::with_capacity(count),
            free: Vec::with_capacity(count),
            ended: Vec::with_capacity(count),
            sums: Vec::new(),
        }
    }

    /// Adds a transfer. Returns its index.
    pub(super) fn begin_transfer(&mut self, io: u64, through: Segment) -> u32 {
        let number = self.free.pop().unwrap_or_else(|| {
            self.in_flight.push(None);
            u32::try_from(self.in_flight.len() - 1).unwrap_or(u32::MAX)
        });
        self.in_flight[number as usize] = Some((io, through));
        number
    }

    /// Number of transfers in flight.
    pub(super) fn in_flight_count(&self) -> usize {
        self.in_flight.iter().flatten().count()
    }

    /// Whether there are ended transfers to report to the pool.
    #[inline]
    pub(super) fn has_unreported(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Handles the completion of a transfer.
    pub(super) fn handle_completion(
        &mut self,
        token: u64,
        status: IoStatus,
        bounce: Option<&BounceMemory>,
    ) {
        let Ok(number) = u32::try_from(token) else { return };
        let Some((io, through)) = self.in_flight[number as usize].take() else { return };
        self.free.push(number);
        let before = self.sums.len();
        let summed = match bounce.filter(|_| status.is_success()) {
            Some(bounce) => bounce.append_checksums(through, &mut self.sums),
            None => Ok(()),
        };
        let status = summed.map_or(IoStatus::DATA_TRANSFER_ERROR, |()| status);
        self.ended.push(CompletedTransfer { io, status, sums: self.sums.len() - before });
    }

    /// Reports ended transfers to the pool.
    pub(super) fn report_ended(&mut self, store: &mut Pool) {
        let mut sums = &self.sums[..];
        for CompletedTransfer { io, status, sums: count } in self.ended.drain(..) {
            let (own, rest) = sums.split_at(count);
            sums = rest;
            let end = match status.is_success() {
                false => ActionResult::Failed(status),
                true if own.is_empty() => ActionResult::Done,
                true => ActionResult::Sums(own),
            };
            store.handle_action_result(io, end);
        }
        self.sums.clear();
    }

    /// Ids of all transfers whose end was not reported to the pool.
    pub(super) fn into_unreported(self) -> impl Iterator<Item = u64> {
        let under_way = self.in_flight.into_iter().flatten().map(|(io, _)| io);
        under_way.chain(self.ended.into_iter().map(|ended| ended.io))
    }
}
