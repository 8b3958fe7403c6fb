//! A queue on a reactor: what is looked at when, and how it sleeps.

use std::io;
use std::os::fd::AsFd;
use std::sync::mpsc::Sender;

use base::{Answers, Backend, Instant, Segment, Span, WakeSource};
use dma::{Region, Regions};
use host::ublk::Ended;
use host::watch::{Interest, Watch};
use reactor::{Context, Found, MeanLatency, Parting, Poller, WokenBy};

use super::driver::Driver;
use super::server::News;
use super::tags::{Step, Tags};

/// A queue, and the backend that it works with. Its light thread ends when the kernel has taken all
/// of its tags back.
pub(super) struct Serving<D> {
    /// Goes first: when it is dropped, nobody touches the memory any more.
    backend: Box<dyn Backend>,
    driver: D,
    tags: Tags,
    number: u16,
    ended: Vec<Ended>,
    answers: Answers,
    watch: Watch,
    /// Of the backend.
    latency: MeanLatency,
    /// The kernel was told that requests are waited for, by this thread.
    has_begun: bool,
    /// What the kernel lends, as long as nobody has copied any of it.
    uncopied: Option<Lending>,
    tell: Sender<News>,
    lending: Option<Lending>,
    _memory: Region,
}

/// Answers that are taken from the backend at once.
const BATCH: usize = 256;
const KERNEL: u64 = 0;
const BACKEND: u64 = 1;
const READABLE: Interest = Interest { readable: true, writable: false };

/// What a queue is made of.
pub(super) struct Parts<D> {
    pub(super) number: u16,
    pub(super) driver: D,
    pub(super) backend: Box<dyn Backend>,
    pub(super) tags: Tags,
    pub(super) memory: Region,
    pub(super) lending: Option<Lending>,
    pub(super) tell: Sender<News>,
}

/// What the kernel lends, and the table that knows how much of it was copied all the same.
#[derive(Clone)]
pub(super) struct Lending {
    pub(super) regions: Regions,
    pub(super) whole: Segment,
}

impl Lending {
    fn copied_bytes(&self) -> u64 {
        self.regions.copied_of_lent(self.whole.region)
    }
}

impl<D: Driver> Serving<D> {
    pub(super) fn new(parts: Parts<D>) -> io::Result<Self> {
        let Parts { number, driver, backend, tags, memory, lending, tell } = parts;
        let tags = tags.with_lent(lending.as_ref().map(|lending| lending.whole));
        let watch = Watch::new()?;
        watch.add(driver.wake_source(), KERNEL, READABLE)?;
        if let WakeSource::Descriptor(descriptor) = backend.wake_source() {
            watch.add(descriptor, BACKEND, READABLE)?;
        }
        Ok(Self {
            backend,
            driver,
            number,
            ended: Vec::with_capacity(usize::from(tags.depth())),
            tags,
            answers: Answers::with_capacity(BATCH),
            watch,
            latency: MeanLatency::default(),
            has_begun: false,
            uncopied: lending.clone(),
            tell,
            lending,
            _memory: memory,
        })
    }

    /// What wakes it: the kernel and its backend.
    pub(super) fn woken_by(&self) -> io::Result<WokenBy> {
        WokenBy::of(WakeSource::Descriptor(self.watch.as_fd()))
    }

    /// Whether looking is of no use, since the kernel brings everything.
    pub(super) fn is_done_by_kernel(&self) -> bool {
        self.backend.is_done_by_kernel()
    }

    /// The kernel knows a queue by the thread that waits for its requests first.
    #[cold]
    fn begin(&mut self) {
        self.has_begun = true;
        for tag in 0..self.tags.depth() {
            self.driver.fetch(tag);
        }
    }

    /// Takes what the kernel asks for.
    #[inline]
    fn receive(&mut self) -> usize {
        self.driver.poll(&mut self.ended);
        let Self { ended, tags, driver, .. } = self;
        let count = ended.len();
        for Ended { tag, result } in ended.drain(..) {
            let step = tags.ended(tag, result, |tag| driver.descriptor(tag));
            follow(step, tags, driver);
        }
        count
    }

    #[inline]
    fn submit(&mut self, now: Instant) -> usize {
        let (requests, segments) = self.tags.requests();
        if requests.is_empty() {
            return 0;
        }
        let taken = self.backend.submit(now, requests, segments);
        self.tags.taken(taken);
        taken
    }

    #[inline]
    fn answer(&mut self, now: Instant) -> usize {
        if self.tags.in_flight() == 0 {
            return 0;
        }
        let count = self.backend.poll(now, &mut self.answers);
        self.latency.end(count);
        let Self { answers, tags, driver, .. } = self;
        for answer in answers.drain() {
            let step = tags.answered(answer);
            follow(step, tags, driver);
        }
        if self.uncopied.is_some() && count > 0 {
            self.look_for_copies();
        }
        count
    }

    /// Says so when data have been copied that were to go without.
    fn look_for_copies(&mut self) {
        let Some(lending) = self.uncopied.take_if(|lending| lending.copied_bytes() > 0) else {
            return;
        };
        let copied = lending.copied_bytes();
        self.tell(News::Trouble(format!(
            "queue {}: the device has had {copied} bytes copied that could go without: what the kernel \
             refuses so is copied",
            self.number
        )));
    }

    /// Ends when the kernel wants nothing more, and says what went wrong.
    fn look_after_the_end(&mut self, context: &mut Context<'_>) -> usize {
        if let Some(text) = self.tags.next_trouble() {
            self.tell(News::Trouble(format!("queue {}: {text}", self.number)));
        }
        if self.tags.is_over() && self.tags.in_flight() == 0 {
            context.end();
            return 1;
        }
        0
    }

    /// Whether only further turns bring it on: a backend that refuses although it has nothing in
    /// flight announces nothing, unless it says when to try again.
    fn is_behind(&self) -> bool {
        let refuses = self.wants_room()
            && self.tags.in_flight() == 0
            && self.backend.wake_at() == Instant::NEVER;
        refuses || !self.has_begun
    }

    fn wants_room(&self) -> bool {
        !self.tags.requests().0.is_empty()
    }

    fn tell(&self, news: News) {
        // If nobody listens, nobody wants to know.
        let _ = self.tell.send(news);
    }
}

/// Does what is to be done about a tag, until there is nothing left just now.
#[inline]
fn follow(mut step: Step, tags: &mut Tags, driver: &mut impl Driver) {
    loop {
        step = match step {
            Step::Nothing => return,
            Step::CopyIn { tag, into } => tags.copied(tag, driver.copy_in(tag, into)),
            Step::CopyOut { tag, from } => tags.copied(tag, driver.copy_out(tag, from)),
            Step::Commit { tag, result } => return driver.commit(tag, result),
        }
    }
}

impl<D: Driver> Poller for Serving<D> {
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        let now = context.now();
        self.latency.pass(now, self.tags.in_flight());
        let mut count = 0;
        if !self.has_begun {
            self.begin();
            count += 1;
        }
        count += self.receive();
        count += self.submit(now);
        count += self.answer(now);
        count += self.look_after_the_end(context);
        Found::from_count(count)
    }

    fn flush(&mut self) {
        self.backend.flush();
        self.driver.flush();
    }

    fn arm(&mut self) -> Found {
        // Both in any case: an old signal, which nobody has taken away, would end every sleep at once.
        let has_answer = self.backend.arm();
        let has_request = self.driver.arm();
        let stays_awake =
            has_request || self.is_behind() || (self.tags.in_flight() > 0 && has_answer);
        Found::from_count(usize::from(stays_awake))
    }

    fn disarm(&mut self) {
        self.backend.disarm();
    }

    fn wake_at(&self) -> Instant {
        let is_waiting = self.tags.in_flight() > 0 || self.wants_room();
        if is_waiting { self.backend.wake_at() } else { Instant::NEVER }
    }

    fn expected_latency(&self) -> Option<Span> {
        self.latency.mean().filter(|_| self.tags.in_flight() > 0)
    }

    /// Lets go when the backend has answered everything. It never moves: it is tied.
    fn detach(&mut self, _: Parting) -> bool {
        self.tags.in_flight() == 0
    }
}

impl<D> Drop for Serving<D> {
    fn drop(&mut self) {
        let copied = self.lending.as_ref().map_or(0, Lending::copied_bytes);
        let done = self.tags.done().with_copied(copied);
        let _ = self.tell.send(News::QueueEnded { queue: self.number, done });
    }
}
