//! Command contexts: state of commands that need more than one request.
//!
//! Their maximum number is known at start. Contexts are allocated on demand, and each keeps the lists it
//! has grown. A command that needs a context when none is free is held at the head of its submission
//! queue, which preserves the order.

use tenmil_base::{Request, Segment};
use tenmil_wire::{Command, Status};

use super::CommandDataLocation;
use super::job::CommandJob;
use crate::data_pointer_walk::{DataPointerWalk, Direction, HostCopy, HostRanges};

/// Contexts of one queue.
#[derive(Debug)]
pub(super) struct ContextPool {
    contexts: Vec<CommandContext>,
    free: Vec<u16>,
    count_max: u16,
    /// Maximum host ranges of the longest transfer.
    ranges_max: usize,
}

/// State of a multi-request command.
#[derive(Debug)]
pub(super) struct CommandContext {
    /// Slot of the command.
    pub(super) slot: u16,
    pub(super) channel: u16,
    pub(super) command: Command,
    pub(super) data: CommandDataLocation,
    pub(super) job: CommandJob,
    pub(super) wait: WaitReason,
    pub(super) walk: DataPointerWalk,
    pub(super) direction: Direction,
    pub(super) ranges: HostRanges,
    pub(super) host_copy: HostCopy,
    /// Segments in which the block device accesses the data.
    pub(super) segments: Vec<Segment>,
    /// Subset of the segments for one request.
    pub(super) part: Vec<Segment>,
    /// Data other than blocks: ranges, keys, reports.
    pub(super) bytes: Vec<u8>,
    pub(super) buffer: Option<Segment>,
    /// Compared data is not equal.
    pub(super) differs: bool,
    /// Status with which the command ends as soon as its memory is not accessed anymore.
    pub(super) cancelled: Option<Status>,
}

/// Condition that a command waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaitReason {
    /// Nothing: it is executing, or there is no command.
    Nothing,
    /// A part of a PRP list or an SGL of this length.
    List { len_bytes: u32 },
    /// A bounce buffer.
    Buffer { is_zeroed: bool },
    /// Host-memory accesses.
    Host(ControllerCopyBuffer),
    /// Space in the block device for this request.
    BackendFull(Request),
    /// Completion by the block device.
    Backend,
    /// The result from the controller.
    Controller,
    /// The first half of its fused pair, or exclusivity for the pair.
    Pair,
}

/// Controller-side buffer of a host copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ControllerCopyBuffer {
    /// The context's own bytes.
    Bytes,
    /// The bounce buffer.
    Buffer,
    /// The bounce buffer, compared with the host's bytes.
    Compare,
}

impl ContextPool {
    /// Creates a pool of at most `count_max` contexts for transfers of at most `transfer_bytes_max`.
    pub(super) fn new(count_max: u16, transfer_bytes_max: u32) -> Self {
        let pages = (transfer_bytes_max >> 12) as usize + 2;
        let (contexts, free) = (Vec::new(), Vec::new());
        Self { contexts, free, count_max, ranges_max: pages.max(256) }
    }

    /// Number of contexts still available.
    pub(super) fn free_count(&self) -> usize {
        usize::from(self.count_max) - (self.contexts.len() - self.free.len())
    }

    /// Whether no context is in use.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.free.len() == self.contexts.len()
    }

    /// Whether a command with a context uses this channel.
    pub(super) fn is_channel_in_use(&self, channel: u16) -> bool {
        self.contexts
            .iter()
            .any(|context| !matches!(context.job, CommandJob::Idle) && context.channel == channel)
    }

    /// Allocates a context for the command in `slot`.
    pub(super) fn allocate(
        &mut self,
        slot: u16,
        channel: u16,
        (command, data): (Command, CommandDataLocation),
        job: CommandJob,
    ) -> Option<u16> {
        let index = self.free.pop().or_else(|| self.grow())?;
        let context = &mut self.contexts[usize::from(index)];
        (context.slot, context.channel, context.job) = (slot, channel, job);
        (context.command, context.data) = (command, data);
        context.wait = WaitReason::Nothing;
        context.host_copy = HostCopy::new();
        context.ranges.clear();
        context.segments.clear();
        context.bytes.clear();
        (context.differs, context.cancelled) = (false, None);
        Some(index)
    }

    /// Creates another context, unless the limit is reached.
    #[cold]
    fn grow(&mut self) -> Option<u16> {
        let index =
            u16::try_from(self.contexts.len()).ok().filter(|index| *index < self.count_max)?;
        self.contexts.push(CommandContext::new(self.ranges_max));
        Some(index)
    }

    /// Frees a context. A context whose memory may still be accessed is never reused.
    pub(super) fn release(&mut self, index: u16) {
        let context = &mut self.contexts[usize::from(index)];
        if context.buffer.is_some() || context.host_copy.has_accesses_in_flight() {
            return;
        }
        context.job = CommandJob::Idle;
        context.wait = WaitReason::Nothing;
        self.free.push(index);
    }

    pub(super) fn get(&mut self, index: u16) -> &mut CommandContext {
        &mut self.contexts[usize::from(index)]
    }

    /// Context referred to by an access identifier or an event, if it has a command.
    pub(super) fn find(&mut self, index: u32) -> Option<(u16, &mut CommandContext)> {
        let index = u16::try_from(index).ok()?;
        let context = self.contexts.get_mut(usize::from(index))?;
        (!matches!(context.job, CommandJob::Idle)).then_some((index, context))
    }
}

impl CommandContext {
    fn new(ranges_max: usize) -> Self {
        Self {
            slot: 0,
            channel: 0,
            command: Command::default(),
            data: CommandDataLocation::Pointers,
            job: CommandJob::Idle,
            wait: WaitReason::Nothing,
            walk: DataPointerWalk::empty(),
            direction: Direction::FromHost,
            ranges: HostRanges::with_max_ranges(ranges_max),
            host_copy: HostCopy::new(),
            segments: Vec::new(),
            part: Vec::new(),
            bytes: Vec::new(),
            buffer: None,
            differs: false,
            cancelled: None,
        }
    }

    /// Length of a result of `len_bytes` with the zeroes that follow it to the end of the host's buffer.
    pub(super) fn padded_result_len(&mut self, len_bytes: u32) -> u32 {
        let CommandDataLocation::Segment(segment) = self.data else { return len_bytes };
        self.bytes.resize(segment.len_bytes as usize, 0);
        segment.len_bytes
    }

    /// Whether a host access or a request may still complete for it.
    pub(super) fn has_pending_completions(&self) -> bool {
        matches!(self.wait, WaitReason::List { .. } | WaitReason::Host(_) | WaitReason::Backend)
    }

    /// Collects the segments of `len_bytes` from byte `at_bytes` on. Returns false if there are too few.
    pub(super) fn collect_segments(&mut self, at_bytes: u32, len_bytes: u32) -> bool {
        self.part.clear();
        let (mut skip, mut left) = (at_bytes, len_bytes);
        for segment in &self.segments {
            if skip >= segment.len_bytes {
                skip -= segment.len_bytes;
                continue;
            }
            let take = (segment.len_bytes - skip).min(left);
            let Some(part) = segment.slice(skip, take) else { return false };
            self.part.push(part);
            (skip, left) = (0, left - take);
            if left == 0 {
                return true;
            }
        }
        left == 0
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{RegionId, Segment};
    use tenmil_wire::{Command, IoOpcode};

    use super::super::job::{CommandJob, FlushAllJob};
    use super::{CommandContext, CommandDataLocation, ContextPool};

    #[test]
    fn context_pool_grows_on_demand_up_to_its_limit() {
        let mut contexts = ContextPool::new(2, 4096);
        let take = |contexts: &mut ContextPool| {
            contexts.allocate(
                0,
                0,
                (Command::new(IoOpcode::Flush.code()), CommandDataLocation::Pointers),
                CommandJob::FlushAll(FlushAllJob::default()),
            )
        };
        assert_eq!(take(&mut contexts), Some(0));
        contexts.release(0);
        assert_eq!(
            (take(&mut contexts), contexts.contexts.len()),
            (Some(0), 1),
            "one is enough so far"
        );
        assert_eq!((take(&mut contexts), take(&mut contexts)), (Some(1), None));
        assert_eq!(contexts.free_count(), 0);
        contexts.release(1);
        assert_eq!(contexts.free_count(), 1);
    }

    #[test]
    fn selected_segments_are_cut_at_both_ends() {
        let segment = |offset, len_bytes| Segment { region: RegionId(1), offset, len_bytes };
        let mut context = CommandContext::new(8);
        context.segments.extend([segment(0, 100), segment(1000, 50), segment(2000, 100)]);
        assert!(context.collect_segments(80, 100));
        assert_eq!(context.part, [segment(80, 20), segment(1000, 50), segment(2000, 30)]);
        assert!(context.collect_segments(100, 50));
        assert_eq!(context.part, [segment(1000, 50)]);
        assert!(context.collect_segments(0, 250));
        assert!(!context.collect_segments(200, 51), "past the end");
    }
}
