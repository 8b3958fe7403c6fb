//! Queue maps: connections of their own for reads, and for what is polled for, beside those for
//! everything else.
//!
//! ```text
//!   channel ─┬─ read  ── connection      small reads do not wait behind large writes
//!            ├─ poll  ── connection
//!            └─ the rest ── connection
//! ```

use std::os::fd::AsFd;
use std::sync::Arc;

use base::{
    Answers, Backend, DoorbellCounts, Extent, Flags, Instant, Limits, Medium, Operation, Request,
    Reservations, Segment, WakeSource,
};
use host::watch::{Interest, Watch};

/// Which kinds of requests have queues of their own, in each channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Maps {
    /// Reads.
    pub read: bool,
    /// What its submitter polls for.
    pub poll: bool,
}

/// A medium whose every channel is several channels of the medium below.
pub(super) struct MappedMedium {
    below: Arc<dyn Medium>,
    maps: Maps,
}

/// Several channels as one.
struct MappedChannel {
    /// For all that has none of its own.
    rest: Box<dyn Backend>,
    /// For reads, and for what is polled for, in this order; without one they go with the rest.
    own: [Option<Box<dyn Backend>>; 2],
    /// Wakes for any of them; `None` if one of them cannot be waited for.
    watch: Option<Watch>,
}

/// Which of them a request takes: a place in `own`.
const READ: usize = 0;
const POLL: usize = 1;

impl Maps {
    /// Channels of the medium below for each channel.
    pub(super) fn count(self) -> u32 {
        1 + u32::from(self.read) + u32::from(self.poll)
    }
}

impl MappedMedium {
    pub(super) const fn new(below: Arc<dyn Medium>, maps: Maps) -> Self {
        Self { below, maps }
    }
}

impl Medium for MappedMedium {
    fn limits(&self) -> Limits {
        self.below.limits()
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let own = |is_wanted: bool| is_wanted.then(|| self.below.channel()).transpose();
        let Maps { read, poll } = self.maps;
        let channel = MappedChannel::new(self.below.channel()?, [own(read)?, own(poll)?]);
        Ok(Box::new(channel))
    }

    fn channels_max(&self) -> u32 {
        (self.below.channels_max() / self.maps.count()).max(1)
    }

    fn extent(&self, lba: u64) -> Result<Extent, String> {
        self.below.extent(lba)
    }

    fn takes_lent(&self) -> Result<u32, String> {
        self.below.takes_lent()
    }

    fn identity(&self) -> Option<String> {
        self.below.identity()
    }

    fn reservations(&self) -> Option<&dyn Reservations> {
        self.below.reservations()
    }

    fn notice_size(&self) -> Result<u64, String> {
        self.below.notice_size()
    }
}

impl MappedChannel {
    fn new(rest: Box<dyn Backend>, own: [Option<Box<dyn Backend>>; 2]) -> Self {
        let watch = watch_of(core::iter::once(&rest).chain(own.iter().flatten()));
        Self { rest, own, watch }
    }

    fn place_of(&self, request: &Request) -> Option<usize> {
        let is_polled = request.flags.has(Flags::POLLED) && self.own[POLL].is_some();
        match request.operation {
            _ if is_polled => Some(POLL),
            Operation::Read if self.own[READ].is_some() => Some(READ),
            _ => None,
        }
    }

    fn all(&self) -> impl Iterator<Item = &dyn Backend> {
        core::iter::once(&*self.rest).chain(self.own.iter().flatten().map(|own| &**own))
    }

    fn each(&mut self) -> impl Iterator<Item = &mut Box<dyn Backend>> {
        core::iter::once(&mut self.rest).chain(self.own.iter_mut().flatten())
    }
}

/// One descriptor for all.
fn watch_of<'a>(backends: impl Iterator<Item = &'a Box<dyn Backend>>) -> Option<Watch> {
    let watch = Watch::new().ok()?;
    for (token, backend) in backends.enumerate() {
        let WakeSource::Descriptor(descriptor) = backend.wake_source() else { return None };
        let readable = Interest { readable: true, writable: false };
        watch.add(descriptor, token as u64, readable).ok()?;
    }
    Some(watch)
}

impl Backend for MappedChannel {
    fn limits(&self) -> &Limits {
        self.rest.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut taken = 0;
        while let Some(first) = requests.get(taken) {
            let place = self.place_of(first);
            let rest = &requests[taken..];
            let alike = rest.iter().take_while(|request| self.place_of(request) == place);
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

    fn flush(&mut self) {
        self.each().for_each(|backend| backend.flush());
    }

    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        // Reads first: somebody waits for them.
        let [read, poll] = &mut self.own;
        let own = poll.iter_mut().chain(read);
        let count: usize = own.map(|backend| backend.poll(now, answers)).sum();
        count + self.rest.poll(now, answers)
    }

    fn doorbells(&self) -> DoorbellCounts {
        self.all().map(Backend::doorbells).fold(DoorbellCounts::default(), DoorbellCounts::plus)
    }

    fn losses(&self) -> u64 {
        self.rest.losses()
    }

    fn heed_losses(&mut self, count: u64) {
        self.each().for_each(|backend| backend.heed_losses(count));
    }

    fn wake_at(&self) -> Instant {
        self.all().map(Backend::wake_at).fold(Instant::NEVER, Instant::min)
    }

    fn wake_source(&self) -> WakeSource<'_> {
        let descriptor = self.watch.as_ref().map(AsFd::as_fd);
        descriptor.map_or(WakeSource::Nothing, WakeSource::Descriptor)
    }

    fn arm(&mut self) -> bool {
        // Each of them is armed, whatever the others have to do.
        let busy = self.each().map(Backend::arm).filter(|is_busy| *is_busy).count();
        busy > 0 || self.watch.is_none()
    }

    fn disarm(&mut self) {
        self.each().for_each(|backend| backend.disarm());
    }
}

#[cfg(test)]
mod tests {
    use base::{Answer, Outcome};

    use super::{
        Answers, Arc, Backend, Flags, Instant, Limits, MappedMedium, Maps, Medium, Operation,
        Request, Segment,
    };
    use std::sync::Mutex;

    /// A medium whose channels answer with their own number, and take so many requests.
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

    impl Medium for Numbered {
        fn limits(&self) -> Limits {
            self.limits.clone()
        }

        fn channel(&self) -> Result<Box<dyn Backend>, String> {
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

    impl Backend for One {
        fn limits(&self) -> &Limits {
            &self.limits
        }

        fn submit(&mut self, _: Instant, requests: &[Request], _: &[Segment]) -> usize {
            let count = requests.len().min(self.room - self.tokens.len());
            self.tokens.extend(requests[..count].iter().map(|request| request.token));
            count
        }

        fn poll(&mut self, _: Instant, answers: &mut Answers) -> usize {
            let result = self.number;
            let answer = |token| Answer { token, outcome: Outcome::SUCCESS, result };
            self.tokens.drain(..).map(answer).for_each(|answer| answers.push(answer));
            answers.len()
        }
    }

    fn request(token: u64, operation: Operation, flags: Flags) -> Request {
        Request { token, operation, flags, ..Request::NOTHING }
    }

    fn limits() -> Limits {
        block::Null::new(512, 1 << 20).unwrap().limits()
    }

    /// What each of these requests is answered by, if there is room for all, and how many are taken.
    fn answered(maps: Maps, room: usize, requests: &[Request]) -> (usize, Vec<u32>) {
        let limits = limits();
        let below = Numbered { limits, made: Mutex::new(0), room };
        let mut channel = MappedMedium::new(Arc::new(below), maps).channel().unwrap();
        let now = Instant::default();
        let taken = channel.submit(now, requests, &[]);
        let mut answers = Answers::with_capacity(16);
        channel.poll(now, &mut answers);
        let mut all: Vec<Answer> = answers.drain().collect();
        all.sort_by_key(|answer| answer.token);
        (taken, all.iter().map(|answer| answer.result).collect())
    }

    #[test]
    fn each_kind_takes_the_queue_that_it_has_or_goes_with_the_rest() {
        let requests = [
            request(0, Operation::Write, Flags::NONE),
            request(1, Operation::Read, Flags::NONE),
            request(2, Operation::Read, Flags::POLLED),
            request(3, Operation::Write, Flags::POLLED),
            request(4, Operation::Flush, Flags::NONE),
        ];
        for (read, poll, expected) in [
            (false, false, [0, 0, 0, 0, 0]),
            (true, false, [0, 1, 1, 0, 0]),
            (false, true, [0, 0, 1, 1, 0]),
            (true, true, [0, 1, 2, 2, 0]),
        ] {
            let maps = Maps { read, poll };
            assert_eq!(answered(maps, 8, &requests), (5, expected.to_vec()), "{maps:?}");
        }
    }

    #[test]
    fn a_full_queue_ends_what_is_taken() {
        let requests: Vec<Request> = [1, 0, 0, 1, 0]
            .into_iter()
            .zip(0..)
            .map(|(is_read, token)| {
                let operation = if is_read == 1 { Operation::Read } else { Operation::Write };
                request(token, operation, Flags::NONE)
            })
            .collect();
        let maps = Maps { read: true, poll: false };
        assert_eq!(answered(maps, 1, &requests), (2, vec![1, 0]));
        assert_eq!(answered(maps, 2, &requests), (4, vec![1, 0, 0, 1]));
    }

    #[test]
    fn each_channel_counts_as_often_as_it_has_queues() {
        let below = || Numbered { limits: limits(), made: Mutex::new(0), room: 1 };
        for (maps, expected) in [
            (Maps::default(), 7),
            (Maps { read: true, poll: false }, 3),
            (Maps { read: true, poll: true }, 2),
        ] {
            assert_eq!(MappedMedium::new(Arc::new(below()), maps).channels_max(), expected);
        }
    }
}
