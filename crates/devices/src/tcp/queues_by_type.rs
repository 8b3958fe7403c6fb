//! Queue maps: dedicated connections for reads and for polled requests.
//!
//! ```text
//!   channel ─┬─ read    ── connection      small reads do not wait behind large writes
//!            ├─ poll    ── connection
//!            └─ default ── connection
//! ```
//!
//! This is a property of the device, below any bdev: the queue map of a bdev
//! ([`tenmil_block::QueueMap`]) shares contexts among channels, and a mirror over such a device has none.

use std::os::fd::AsFd;
use std::sync::Arc;

use tenmil_base::{
    BlockDevice, BlockExtent, ChannelWakeup, CompletionBatch, DoorbellStats, Error, Instant,
    IoChannel, Limits, Operation, Request, RequestFlags, ReservationControl, Segment, WakeSource,
};
use tenmil_linux::poll_set::{Interest, PollSet};

/// Kinds of requests that have a dedicated queue in each channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueMapOptions {
    /// Reads.
    pub read: bool,
    /// Requests that their submitter polls for.
    pub poll: bool,
}

/// Block device whose channels each use several channels of the device below.
pub(super) struct QueuesByTypeDevice {
    below: Arc<dyn BlockDevice>,
    maps: QueueMapOptions,
}

/// Several channels combined into one.
struct QueuesByTypeChannel {
    /// Default queue, for all other requests.
    rest: Box<dyn IoChannel>,
    /// Dedicated queues for reads and for polled requests, in this order. Requests without one use
    /// the default queue.
    own: [Option<Box<dyn IoChannel>>; 2],
    /// Becomes readable when any of the queues does. `None` if one of them cannot be waited for.
    watch: Option<PollSet>,
}

/// Indices into `own`.
const READ: usize = 0;
const POLL: usize = 1;

impl QueueMapOptions {
    /// Channels of the device below for each channel.
    pub(super) fn count(self) -> u32 {
        1 + u32::from(self.read) + u32::from(self.poll)
    }
}

impl QueuesByTypeDevice {
    pub(super) const fn new(below: Arc<dyn BlockDevice>, maps: QueueMapOptions) -> Self {
        Self { below, maps }
    }
}

impl BlockDevice for QueuesByTypeDevice {
    fn limits(&self) -> Limits {
        self.below.limits()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let own = |is_wanted: bool| is_wanted.then(|| self.below.channel()).transpose();
        let QueueMapOptions { read, poll } = self.maps;
        let channel = QueuesByTypeChannel::new(self.below.channel()?, [own(read)?, own(poll)?]);
        Ok(Box::new(channel))
    }

    fn channels_max(&self) -> u32 {
        (self.below.channels_max() / self.maps.count()).max(1)
    }

    fn block_status(&self, lba: u64) -> Result<BlockExtent, Error> {
        self.below.block_status(lba)
    }

    fn supports_kernel_buffers(&self) -> Result<u32, Error> {
        self.below.supports_kernel_buffers()
    }

    fn identity(&self) -> Option<String> {
        self.below.identity()
    }

    fn failure_reason(&self) -> Option<String> {
        self.below.failure_reason()
    }

    fn reservations(&self) -> Option<&dyn ReservationControl> {
        self.below.reservations()
    }

    fn refresh_size(&self) -> Result<u64, Error> {
        self.below.refresh_size()
    }
}

impl QueuesByTypeChannel {
    fn new(rest: Box<dyn IoChannel>, own: [Option<Box<dyn IoChannel>>; 2]) -> Self {
        let watch = poll_set_of_channels(core::iter::once(&rest).chain(own.iter().flatten()));
        Self { rest, own, watch }
    }

    fn queue_index_of(&self, request: &Request) -> Option<usize> {
        let is_polled = request.flags.has(RequestFlags::POLLED) && self.own[POLL].is_some();
        match request.operation {
            _ if is_polled => Some(POLL),
            Operation::Read if self.own[READ].is_some() => Some(READ),
            _ => None,
        }
    }

    fn all(&self) -> impl Iterator<Item = &dyn IoChannel> {
        core::iter::once(&*self.rest).chain(self.own.iter().flatten().map(|own| &**own))
    }

    fn each(&mut self) -> impl Iterator<Item = &mut Box<dyn IoChannel>> {
        core::iter::once(&mut self.rest).chain(self.own.iter_mut().flatten())
    }
}

/// Combines the descriptors of all channels into one.
fn poll_set_of_channels<'a>(
    backends: impl Iterator<Item = &'a Box<dyn IoChannel>>,
) -> Option<PollSet> {
    let watch = PollSet::new().ok()?;
    for (token, backend) in backends.enumerate() {
        let WakeSource::Descriptor(descriptor) = backend.wake_source() else { return None };
        let readable = Interest { readable: true, writable: false };
        watch.add(descriptor, token as u64, readable).ok()?;
    }
    Some(watch)
}

impl IoChannel for QueuesByTypeChannel {
    fn limits(&self) -> &Limits {
        self.rest.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut taken = 0;
        while let Some(first) = requests.get(taken) {
            let place = self.queue_index_of(first);
            let rest = &requests[taken..];
            let alike = rest.iter().take_while(|request| self.queue_index_of(request) == place);
            let run = &rest[..alike.count()];
            let own = place.and_then(|place| self.own[place].as_mut());
            let count = own.unwrap_or(&mut self.rest).submit(now, run, segments);
            taken += count;
            if count < run.len() {
                break;
            }
        }
        taken
    }

    fn flush_submissions(&mut self) {
        self.each().for_each(|backend| backend.flush_submissions());
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        // Polled requests and reads first: they are sensitive to latency.
        let [read, poll] = &mut self.own;
        let own = poll.iter_mut().chain(read);
        let count: usize = own.map(|backend| backend.poll(now, completions)).sum();
        count + self.rest.poll(now, completions)
    }

    fn doorbell_stats(&self) -> DoorbellStats {
        self.all()
            .map(IoChannel::doorbell_stats)
            .fold(DoorbellStats::default(), DoorbellStats::plus)
    }

    fn known_write_loss_count(&self) -> u64 {
        self.rest.known_write_loss_count()
    }

    fn ack_repaired_write_losses(&mut self, count: u64) {
        self.each().for_each(|backend| backend.ack_repaired_write_losses(count));
    }
}

impl ChannelWakeup for QueuesByTypeChannel {
    fn wake_at(&self) -> Instant {
        self.all().map(ChannelWakeup::wake_at).fold(Instant::NEVER, Instant::min)
    }

    fn wake_source(&self) -> WakeSource<'_> {
        let descriptor = self.watch.as_ref().map(AsFd::as_fd);
        descriptor.map_or(WakeSource::None, WakeSource::Descriptor)
    }

    fn arm(&mut self) -> bool {
        // Every queue is armed, even if an earlier one has work: a sleep needs all of them armed.
        let busy = self.each().map(ChannelWakeup::arm).filter(|is_busy| *is_busy).count();
        busy > 0 || self.watch.is_none()
    }

    fn disarm(&mut self) {
        self.each().for_each(|backend| backend.disarm());
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{IoCompletion, IoStatus};

    use super::{
        Arc, BlockDevice, ChannelWakeup, CompletionBatch, Instant, IoChannel, Limits, Operation,
        QueueMapOptions, QueuesByTypeDevice, Request, RequestFlags, Segment,
    };
    use std::sync::Mutex;

    /// A device whose channels complete requests with their own number, with a limited depth.
    struct Numbered {
        limits: Limits,
        made: Mutex<u32>,
        room: usize,
    }

    struct One {
        number: u32,
        limits: Limits,
        room: usize,
        tokens: Vec<u64>,
    }

    impl BlockDevice for Numbered {
        fn limits(&self) -> Limits {
            self.limits.clone()
        }

        fn channel(&self) -> Result<Box<dyn IoChannel>, tenmil_base::Error> {
            let mut made = self.made.lock().unwrap();
            let number = *made;
            *made += 1;
            let (limits, room) = (self.limits.clone(), self.room);
            Ok(Box::new(One { number, limits, room, tokens: Vec::new() }))
        }

        fn channels_max(&self) -> u32 {
            7
        }
    }

    impl IoChannel for One {
        fn limits(&self) -> &Limits {
            &self.limits
        }

        fn submit(&mut self, _: Instant, requests: &[Request], _: &[Segment]) -> usize {
            let count = requests.len().min(self.room - self.tokens.len());
            self.tokens.extend(requests[..count].iter().map(|request| request.token));
            count
        }

        fn poll(&mut self, _: Instant, completions: &mut CompletionBatch) -> usize {
            let result = self.number;
            let completion = |token| IoCompletion { token, status: IoStatus::SUCCESS, result };
            self.tokens
                .drain(..)
                .map(completion)
                .for_each(|completion| completions.push(completion));
            completions.len()
        }
    }

    impl ChannelWakeup for One {}

    fn request(token: u64, operation: Operation, flags: RequestFlags) -> Request {
        Request { token, operation, flags, ..Request::PLACEHOLDER }
    }

    fn limits() -> Limits {
        tenmil_drivers::NullDevice::new(512, 1 << 20).unwrap().limits()
    }

    /// Channel that completed each of these requests, and number of requests accepted.
    fn accepted_and_completing_channels(
        maps: QueueMapOptions,
        room: usize,
        requests: &[Request],
    ) -> (usize, Vec<u32>) {
        let limits = limits();
        let below = Numbered { limits, made: Mutex::new(0), room };
        let mut channel = QueuesByTypeDevice::new(Arc::new(below), maps).channel().unwrap();
        let now = Instant::default();
        let taken = channel.submit(now, requests, &[]);
        let mut completions = CompletionBatch::with_capacity(16);
        channel.poll(now, &mut completions);
        let mut all: Vec<IoCompletion> = completions.drain().collect();
        all.sort_by_key(|completion| completion.token);
        (taken, all.iter().map(|completion| completion.result).collect())
    }

    #[test]
    fn each_operation_type_uses_its_queue_or_the_default() {
        let requests = [
            request(0, Operation::Write, RequestFlags::NONE),
            request(1, Operation::Read, RequestFlags::NONE),
            request(2, Operation::Read, RequestFlags::POLLED),
            request(3, Operation::Write, RequestFlags::POLLED),
            request(4, Operation::Flush, RequestFlags::NONE),
        ];
        for (read, poll, expected) in [
            (false, false, [0, 0, 0, 0, 0]),
            (true, false, [0, 1, 1, 0, 0]),
            (false, true, [0, 0, 1, 1, 0]),
            (true, true, [0, 1, 2, 2, 0]),
        ] {
            let maps = QueueMapOptions { read, poll };
            assert_eq!(
                accepted_and_completing_channels(maps, 8, &requests),
                (5, expected.to_vec()),
                "{maps:?}"
            );
        }
    }

    #[test]
    fn batch_ends_at_a_full_queue() {
        let requests: Vec<Request> = [1, 0, 0, 1, 0]
            .into_iter()
            .zip(0..)
            .map(|(is_read, token)| {
                let operation = if is_read == 1 { Operation::Read } else { Operation::Write };
                request(token, operation, RequestFlags::NONE)
            })
            .collect();
        let maps = QueueMapOptions { read: true, poll: false };
        assert_eq!(accepted_and_completing_channels(maps, 1, &requests), (2, vec![1, 0]));
        assert_eq!(accepted_and_completing_channels(maps, 2, &requests), (4, vec![1, 0, 0, 1]));
    }

    #[test]
    fn channels_max_is_divided_by_the_queues_per_channel() {
        let below = || Numbered { limits: limits(), made: Mutex::new(0), room: 1 };
        for (maps, expected) in [
            (QueueMapOptions::default(), 7),
            (QueueMapOptions { read: true, poll: false }, 3),
            (QueueMapOptions { read: true, poll: true }, 2),
        ] {
            assert_eq!(QueuesByTypeDevice::new(Arc::new(below()), maps).channels_max(), expected);
        }
    }
}
