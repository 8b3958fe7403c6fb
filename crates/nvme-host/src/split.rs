//! Split requests: requests that need more than one command.
//!
//! A request above the controller's limits becomes a parent in a table of fixed size, and its commands
//! are its children. As many children are sent as there are slots; `poll` sends the others as slots
//! become free. The parent completes once, after its last child, with the worst status of all. After a
//! child has failed, no further ones are sent.

use std::collections::VecDeque;

use tenmil_base::{IoCompletion, IoStatus, Request, Segment};
use tenmil_wire::Status;

use crate::queue_pair::SplitTracker;

/// Parents of one queue.
#[derive(Debug)]
pub(crate) struct SplitTable {
    parents: Box<[SplitParent]>,
    /// Segments of all parents, `segments_max` for each.
    segments: Box<[Segment]>,
    segments_max: usize,
    free: Vec<usize>,
    /// Parents with unsent children, oldest first.
    unsent: VecDeque<usize>,
}

#[derive(Clone, Copy, Debug)]
struct SplitParent {
    request: Request,
    segment_count: usize,
    /// Blocks covered by the children sent.
    sent_blocks: u32,
    children: u32,
    status: IoStatus,
}

/// Unsent part of a split request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UnsentPart<'a> {
    pub(crate) parent: usize,
    pub(crate) request: &'a Request,
    /// Segments of the request, data first, then metadata.
    pub(crate) segments: &'a [Segment],
    pub(crate) sent_blocks: u32,
}

const EMPTY: Request = Request {
    token: 0,
    lba: 0,
    operand: 0,
    blocks: 0,
    segment_first: 0,
    segment_count: 0,
    metadata_count: 0,
    operation: tenmil_base::Operation::Flush,
    flags: tenmil_base::RequestFlags::NONE,
};

impl SplitTable {
    /// Creates a table for `count` requests of `segments_max` segments each.
    pub(crate) fn new(count: usize, segments_max: usize) -> Self {
        let unused = SplitParent {
            request: EMPTY,
            segment_count: 0,
            sent_blocks: 0,
            children: 0,
            status: IoStatus::SUCCESS,
        };
        Self {
            parents: vec![unused; count].into_boxed_slice(),
            segments: vec![Segment::default(); count * segments_max].into_boxed_slice(),
            segments_max,
            free: (0..count).rev().collect(),
            unsent: VecDeque::with_capacity(count),
        }
    }

    /// Adds a request whose children are to be sent. `None` if the table is full.
    pub(crate) fn begin(&mut self, request: &Request, segments: &[Segment]) -> Option<usize> {
        let parent = self.allocate_parent(request, segments)?;
        self.unsent.push_back(parent);
        Some(parent)
    }

    /// Adds a request of which all `children` are sent at once.
    pub(crate) fn begin_all_sent(&mut self, token: u64, children: u32) -> Option<usize> {
        let parent = self.allocate_parent(&Request { token, ..EMPTY }, &[])?;
        self.parents[parent].children = children;
        Some(parent)
    }

    fn allocate_parent(&mut self, request: &Request, segments: &[Segment]) -> Option<usize> {
        if segments.len() > self.segments_max {
            return None;
        }
        let parent = self.free.pop()?;
        let first = parent * self.segments_max;
        self.segments[first..first + segments.len()].copy_from_slice(segments);
        self.parents[parent] = SplitParent {
            request: *request,
            segment_count: segments.len(),
            sent_blocks: 0,
            children: 0,
            status: IoStatus::SUCCESS,
        };
        Some(parent)
    }

    /// Whether there are unsent children.
    #[inline]
    pub(crate) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Oldest request with unsent children.
    pub(crate) fn next_unsent(&self) -> Option<UnsentPart<'_>> {
        let parent = *self.unsent.front()?;
        let SplitParent { request, segment_count, sent_blocks, .. } = &self.parents[parent];
        let first = parent * self.segments_max;
        let segments = &self.segments[first..first + segment_count];
        Some(UnsentPart { parent, request, segments, sent_blocks: *sent_blocks })
    }

    /// Records that the oldest such request has sent a child of `blocks`.
    pub(crate) fn record_sent_child(&mut self, blocks: u32) {
        let Some(parent) = self.unsent.front() else { return };
        let parent = &mut self.parents[*parent];
        parent.children += 1;
        parent.sent_blocks += blocks;
        if parent.sent_blocks >= parent.request.blocks {
            self.unsent.pop_front();
        }
    }

    /// Fails the oldest such request. Returns its completion if none of its children is in flight.
    pub(crate) fn fail_oldest_unsent(&mut self, status: IoStatus) -> Option<IoCompletion> {
        let parent = self.unsent.pop_front()?;
        self.parents[parent].merge_status(status);
        self.finish_if_done(parent)
    }

    fn finish_if_done(&mut self, index: usize) -> Option<IoCompletion> {
        let parent = &self.parents[index];
        if parent.children > 0 || self.unsent.contains(&index) {
            return None;
        }
        let answer = IoCompletion { token: parent.request.token, status: parent.status, result: 0 };
        self.free.push(index);
        Some(answer)
    }
}

impl SplitTracker for SplitTable {
    fn handle_child_completion(
        &mut self,
        token: u64,
        status: IoStatus,
        _: u32,
    ) -> Option<IoCompletion> {
        let index = usize::try_from(token).ok()?;
        let parent = self.parents.get_mut(index)?;
        parent.children = parent.children.checked_sub(1)?;
        parent.merge_status(status);
        if !status.is_success() {
            self.unsent.retain(|unsent| *unsent != index);
        }
        self.finish_if_done(index)
    }
}

impl SplitParent {
    /// Keeps the worse of two statuses; of equally severe ones the first.
    fn merge_status(&mut self, status: IoStatus) {
        if severity(status) > severity(self.status) {
            self.status = status;
        }
    }
}

/// Severity of a status. Errors that a retry cannot fix are more severe than others; a status that only
/// reports the failure of the other half of a fused pair is the least severe error.
fn severity(status: IoStatus) -> u8 {
    let status = Status(status.0);
    if status.is_success() {
        0
    } else if status.has_same_code_as(Status::ABORTED_FAILED_FUSED)
        || status.has_same_code_as(Status::ABORTED_MISSING_FUSED)
    {
        1
    } else if status.is_path_error() {
        2
    } else if !status.dnr() {
        3
    } else {
        4
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{IoStatus, Operation, Request, Segment};

    use super::{EMPTY, SplitTable};
    use crate::queue_pair::SplitTracker;

    fn request(token: u64, blocks: u32) -> Request {
        Request { token, blocks, operation: Operation::Read, ..EMPTY }
    }

    fn end(table: &mut SplitTable, parent: usize, status: IoStatus) -> Option<(u64, IoStatus)> {
        let answer = table.handle_child_completion(u64::try_from(parent).unwrap(), status, 9)?;
        Some((answer.token, answer.status))
    }

    #[test]
    fn parent_completes_once_after_its_last_child() {
        let mut table = SplitTable::new(1, 2);
        let parent = table.begin(&request(7, 3), &[]).unwrap();
        table.record_sent_child(1);
        assert_eq!(
            end(&mut table, parent, IoStatus::SUCCESS),
            None,
            "the others are not even sent"
        );
        table.record_sent_child(1);
        table.record_sent_child(1);
        assert!(!table.has_unsent());
        assert_eq!(end(&mut table, parent, IoStatus::SUCCESS), None);
        assert_eq!(end(&mut table, parent, IoStatus::SUCCESS), Some((7, IoStatus::SUCCESS)));
        assert_eq!(end(&mut table, parent, IoStatus::SUCCESS), None, "and never again");
    }

    #[test]
    fn worst_status_is_kept_in_every_order() {
        let aborted_half = IoStatus(0x09);
        let final_one = IoStatus(0x4281);
        let rising = [
            IoStatus::SUCCESS,
            aborted_half,
            IoStatus::PATH_ERROR,
            IoStatus::COMPARE_FAILURE,
            final_one,
        ];
        for (worse, status) in rising.iter().enumerate() {
            for better in &rising[..=worse] {
                for pair in [[status, better], [better, status]] {
                    let mut table = SplitTable::new(1, 0);
                    let parent = table.begin_all_sent(1, 2).unwrap();
                    assert_eq!(end(&mut table, parent, *pair[0]), None);
                    assert_eq!(end(&mut table, parent, *pair[1]), Some((1, *status)));
                }
            }
        }
    }

    #[test]
    fn no_child_is_sent_after_a_failure() {
        let mut table = SplitTable::new(2, 0);
        let first = table.begin(&request(1, 9), &[]).unwrap();
        table.record_sent_child(1);
        table.record_sent_child(1);
        let second = table.begin(&request(2, 1), &[]).unwrap();
        assert_eq!(table.next_unsent().unwrap().parent, first);
        assert_eq!(end(&mut table, first, IoStatus::WRITE_FAULT), None, "one is still out");
        assert_eq!(table.next_unsent().unwrap().parent, second);
        assert_eq!(end(&mut table, first, IoStatus::SUCCESS), Some((1, IoStatus::WRITE_FAULT)));
    }

    #[test]
    fn failed_parent_completes_once_no_child_is_in_flight() {
        let mut table = SplitTable::new(2, 0);
        table.begin(&request(1, 9), &[]).unwrap();
        let answer = table.fail_oldest_unsent(IoStatus::INVALID_FIELD).unwrap();
        assert_eq!((answer.token, answer.status), (1, IoStatus::INVALID_FIELD));
        let parent = table.begin(&request(2, 9), &[]).unwrap();
        table.record_sent_child(4);
        assert_eq!(table.fail_oldest_unsent(IoStatus::INVALID_FIELD), None);
        assert_eq!(end(&mut table, parent, IoStatus::SUCCESS), Some((2, IoStatus::INVALID_FIELD)));
        assert_eq!(table.fail_oldest_unsent(IoStatus::INVALID_FIELD), None, "no request is left");
    }

    #[test]
    fn full_table_and_too_many_segments_are_rejected() {
        let mut table = SplitTable::new(2, 1);
        let segments = [Segment { offset: 5, ..Segment::default() }; 2];
        assert_eq!(table.begin(&request(1, 1), &segments), None);
        let first = table.begin(&request(1, 2), &segments[..1]).unwrap();
        let second = table.begin(&request(2, 2), &[]).unwrap();
        assert_ne!(first, second);
        assert_eq!(table.begin(&request(3, 2), &[]), None);
        assert_eq!(table.next_unsent().unwrap().segments, &segments[..1]);
        table.record_sent_child(2);
        assert!(end(&mut table, first, IoStatus::SUCCESS).is_some());
        assert!(table.begin(&request(3, 2), &[]).is_some());
    }
}
