//! Namespace table: maps an NSID to the data of the fast path by one array index.

use tenmil_base::{
    ChannelGroup, Error, Instant, IoCounters, Limits, MediumMemory, Operation, Span,
};
use tenmil_wire::Status;

use super::channel::{ChannelCounters, NamespaceChannel};
use super::completion_counter::{CompletionCounter, StartTime};
use super::slot_table::{Slot, SlotState};
use crate::controller::transport_interface::IoTotals;
use crate::io_stats::QueueIoStats;
use crate::namespace::{Namespace, NamespaceSnapshot};

/// Namespaces of one snapshot, with a channel to each.
#[derive(Debug)]
pub(super) struct NamespaceTable {
    /// Entry `nsid`; entry 0 is never used.
    entries: Vec<FastPathNamespace>,
    channels: Vec<Option<NamespaceChannel>>,
    /// The channels are polled together.
    group: ChannelGroup,
    nsid_max: u32,
    depth: usize,
    /// Where the counters of the channels are registered, if readers want them.
    io_stats: Option<QueueIoStats>,
    /// Totals of the closed channels.
    closed: IoTotals,
    has_retired: bool,
}

/// Namespace data cached for the fast path.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(super) struct FastPathNamespace {
    pub(super) block_count: u64,
    /// Status that rejects every command, if any.
    pub(super) unavailable: Option<Status>,
    /// Index into the channels, or [`NO_CHANNEL`].
    pub(super) channel: u16,
    /// Maximum blocks of a request that needs no splitting.
    pub(super) blocks_max: u32,
    pub(super) block_shift: u8,
    /// Blocks of the block device per logical block, as a power of two.
    pub(super) device_shift: u8,
    /// [`FAST_READ`], [`FAST_WRITE`], and why other accesses are rejected.
    pub(super) rights: u8,
}

const _: () = assert!(size_of::<FastPathNamespace>() == 32, "two entries to a cache line");

/// Reads need no further check; the value is the opcode (NVM 1.1 §3.3.4).
pub(super) const FAST_READ: u8 = 0x02;
/// Writes need no further check; the value is the opcode (NVM 1.1 §3.3.6).
pub(super) const FAST_WRITE: u8 = 0x01;
/// A reservation rejects reads.
pub(super) const READ_CONFLICT: u8 = 0x10;
/// A reservation rejects writes.
pub(super) const WRITE_CONFLICT: u8 = 0x20;
/// The namespace is write protected.
pub(super) const WRITE_PROTECTED: u8 = 0x40;
/// Reservations cannot be changed.
pub(super) const RESERVATIONS_DENIED: u8 = 0x80;

const NO_CHANNEL: u16 = u16::MAX;
const NO_ENTRY: FastPathNamespace = FastPathNamespace {
    block_count: 0,
    unavailable: None,
    channel: NO_CHANNEL,
    blocks_max: 0,
    block_shift: 0,
    device_shift: 0,
    rights: 0,
};

impl NamespaceTable {
    /// Creates an empty table for a queue of `depth` commands.
    pub(super) fn new(depth: usize, io_stats: Option<QueueIoStats>) -> Self {
        let (entries, channels) = (Vec::new(), Vec::new());
        let group = ChannelGroup::default();
        let closed = IoTotals::default();
        Self { entries, channels, group, nsid_max: 0, depth, io_stats, closed, has_retired: false }
    }

    /// Applies a new snapshot: opens channels to new block devices and retires those that are gone.
    /// Returns the errors as text.
    pub(super) fn update(&mut self, namespaces: &NamespaceSnapshot) -> Vec<String> {
        let mut errors = Vec::new();
        self.nsid_max = namespaces.nsid_max();
        self.entries.clear();
        self.entries.resize(namespaces.table_len(), NO_ENTRY);
        for channel in self.channels.iter_mut().flatten() {
            channel.is_retired = true;
        }
        for namespace in namespaces.iter() {
            let channel = match self.open_channel_to(namespace) {
                Ok(channel) => channel,
                Err(error) => {
                    errors.push(format!("namespace {}: {error}", namespace.nsid));
                    NO_CHANNEL
                }
            };
            self.entries[namespace.nsid as usize] = fast_path_namespace(namespace, channel);
        }
        self.has_retired = self.channels.iter().flatten().any(|channel| channel.is_retired);
        errors
    }

    fn open_channel_to(&mut self, namespace: &Namespace) -> Result<u16, Error> {
        let (nsid, device) = (namespace.nsid, &namespace.device);
        let known = self.channels.iter_mut().position(|slot| {
            slot.as_mut().is_some_and(|channel| {
                let is_match = channel.nsid == nsid && channel.belongs_to(device);
                channel.is_retired &= !is_match;
                if is_match {
                    channel.cache.clone_from(&namespace.cache);
                    channel.block_shift = namespace.block_shift;
                }
                is_match
            })
        });
        let index = match known {
            Some(index) => index,
            None => {
                let counters = match &self.io_stats {
                    Some(queue) => ChannelCounters::Registered(queue.register(nsid)),
                    None => ChannelCounters::HealthLog(Box::new(IoCounters::new(false))),
                };
                let open = || NamespaceChannel::open(nsid, device, self.depth, counters);
                let mut channel = self.group.open_member(open)?;
                channel.cache = namespace.cache.clone();
                channel.block_shift = namespace.block_shift;
                let free = self.channels.iter().position(Option::is_none);
                let index = free.unwrap_or_else(|| {
                    self.channels.push(None);
                    self.channels.len() - 1
                });
                self.channels[index] = Some(channel);
                index
            }
        };
        u16::try_from(index)
            .map_err(|_| format!("{index} channels are open, expected fewer"))
            .map_err(Error::environment)
    }

    /// Closes the retired channels that are idle and not used by a command in progress.
    #[inline]
    pub(super) fn close_retired_if_idle(&mut self, is_used: impl Fn(u16) -> bool) {
        if self.has_retired {
            self.close_retired(is_used);
        }
    }

    #[cold]
    fn close_retired(&mut self, is_used: impl Fn(u16) -> bool) {
        self.has_retired = false;
        for (index, slot) in (0..).zip(self.channels.iter_mut()) {
            if slot.as_ref().is_some_and(|channel| channel.is_retired) {
                let is_free =
                    slot.as_ref().is_some_and(NamespaceChannel::is_idle) && !is_used(index);
                if is_free {
                    let closed = slot.take();
                    let totals = closed.as_ref().map(NamespaceChannel::io_totals);
                    self.closed.add(&totals.unwrap_or_default());
                } else {
                    self.has_retired = true;
                }
            }
        }
    }

    /// Number of channel indices, including free ones.
    #[inline]
    pub(super) fn channel_count(&self) -> u16 {
        u16::try_from(self.channels.len()).unwrap_or(NO_CHANNEL)
    }

    /// Entry of an NSID, or the status that rejects the NSID (Base 2.1 §4.2.3.1, §3.2.1.2).
    pub(super) fn checked_entry(&self, nsid: u32) -> Result<FastPathNamespace, Status> {
        if nsid == 0 || nsid > self.nsid_max {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr());
        }
        let Some(entry) = self.fast_path_entry(nsid).filter(|entry| entry.block_shift != 0) else {
            return Err(Status::INVALID_FIELD.with_dnr());
        };
        match entry.unavailable {
            Some(status) => Err(status),
            None if entry.channel == NO_CHANNEL => Err(Status::NAMESPACE_NOT_READY),
            None => Ok(*entry),
        }
    }

    #[inline]
    pub(super) fn fast_path_entry(&self, nsid: u32) -> Option<&FastPathNamespace> {
        self.entries.get(nsid as usize)
    }

    #[inline]
    pub(super) fn channel(&mut self, index: u16) -> Option<&mut NamespaceChannel> {
        self.channels.get_mut(usize::from(index))?.as_mut()
    }

    #[inline]
    pub(super) fn channels(&mut self) -> impl Iterator<Item = &mut NamespaceChannel> {
        self.channels.iter_mut().flatten()
    }

    /// Totals of the queue's commands.
    pub(super) fn io_totals(&self) -> IoTotals {
        let mut sum = self.closed;
        self.channels.iter().flatten().for_each(|channel| sum.add(&channel.io_totals()));
        sum
    }

    /// Counters of the completions of a channel, if they are counted.
    #[inline]
    pub(super) fn completion_counter(
        &self,
        index: u16,
        now: StartTime,
    ) -> Option<CompletionCounter<'_>> {
        let channel = self.channels.get(usize::from(index))?.as_ref()?;
        let ChannelCounters::Registered(registered) = &channel.counters else { return None };
        let (counters, block_shift) = (registered.counters(), channel.block_shift);
        Some(CompletionCounter { counters, block_shift, now })
    }

    /// Counters of a command that completes outside the loops of the fast path; `None` if it was counted when
    /// it began.
    pub(super) fn command_counter(
        &self,
        slot: &Slot,
        now: StartTime,
    ) -> Option<CompletionCounter<'_>> {
        let channel = self.channels.get(usize::from(slot.channel()))?.as_ref()?;
        let is_counted = matches!(channel.counters, ChannelCounters::HealthLog(_))
            && slot.state() == SlotState::Fast;
        let (counters, block_shift) = (channel.counters.counters(), channel.block_shift);
        (!is_counted).then_some(CompletionCounter { counters, block_shift, now })
    }

    /// Counts commands for a namespace that waited for a rate limit before they began, and the sum of the
    /// times that they waited.
    pub(super) fn count_limit_wait(&self, nsid: u32, count: u64, time: Span) {
        let mut channels = self.channels.iter().flatten();
        let channel = channels.find(|channel| channel.nsid == nsid && !channel.is_retired);
        if let Some(channel) = channel {
            channel.counters.counters().add_limit_wait(count, time);
        }
    }

    /// Channels available to new commands, with their indices.
    pub(super) fn available_channels(&self) -> impl Iterator<Item = (u16, &NamespaceChannel)> {
        (0..)
            .zip(self.channels.iter())
            .filter_map(|(index, slot)| Some((index, slot.as_ref()?)))
            .filter(|(_, channel)| !channel.is_retired)
    }

    /// Limits of the block device of a channel.
    pub(super) fn limits(&self, index: u16) -> Option<&Limits> {
        self.channels.get(usize::from(index))?.as_ref().map(|channel| &channel.limits)
    }

    /// Memory of the block device of a channel, if it has any.
    pub(super) fn medium_memory(&self, index: u16) -> Option<&MediumMemory> {
        self.channels.get(usize::from(index))?.as_ref()?.medium.as_ref()
    }

    /// NSID of a channel, or 0.
    pub(super) fn nsid_of(&self, index: u16) -> u32 {
        let channel = self.channels.get(usize::from(index)).and_then(Option::as_ref);
        channel.map_or(0, |channel| channel.nsid)
    }

    /// Records that a flush failed: revokes the cache instance of the channel's namespace.
    #[cold]
    pub(super) fn revoke_cache_instance(&self, index: u16) {
        let channel = self.channels.get(usize::from(index)).and_then(Option::as_ref);
        if let Some(cache) = channel.and_then(|channel| channel.cache.as_ref()) {
            cache.revoke();
        }
    }

    /// Earliest deadline of the block devices.
    pub(super) fn wake_at(&self) -> Instant {
        let wakes = self.channels.iter().flatten().map(NamespaceChannel::wake_at);
        wakes.min().unwrap_or(Instant::NEVER)
    }
}

fn fast_path_namespace(namespace: &Namespace, channel: u16) -> FastPathNamespace {
    let device_shift = namespace.device_blocks_per_block_shift();
    let limits = &namespace.limits;
    let mut rights = 0;
    if let Some(reservation) = namespace.reservation {
        rights |= if reservation.rejects_reads() { READ_CONFLICT } else { 0 };
        rights |= if reservation.rejects_writes() { WRITE_CONFLICT } else { 0 };
    }
    rights |= if namespace.is_write_protected { WRITE_PROTECTED } else { 0 };
    rights |= if namespace.denies_reservations { RESERVATIONS_DENIED } else { 0 };
    let unavailable = rejection_status(namespace);
    let is_open = unavailable.is_none() && channel != NO_CHANNEL;
    if is_open && rights & READ_CONFLICT == 0 && limits.operations.has(Operation::Read) {
        rights |= FAST_READ;
    }
    let rejects_writes = rights & (WRITE_CONFLICT | WRITE_PROTECTED) != 0;
    if is_open && !rejects_writes && limits.operations.has(Operation::Write) {
        rights |= FAST_WRITE;
    }
    FastPathNamespace {
        block_count: namespace.block_count,
        unavailable,
        channel,
        blocks_max: limits.request_blocks_max >> device_shift,
        block_shift: namespace.block_shift,
        device_shift,
        rights,
    }
}

/// Status that rejects every command. This controller does not move metadata, so a format with metadata
/// is rejected.
fn rejection_status(namespace: &Namespace) -> Option<Status> {
    let has_metadata = namespace.metadata_size != 0 || namespace.limits.metadata_size != 0;
    let is_too_small = 1_u64.checked_shl(namespace.block_shift.into())
        < Some(u64::from(namespace.limits.block_size));
    let wrong = has_metadata || is_too_small;
    namespace.unavailable.or(wrong.then_some(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr()))
}
