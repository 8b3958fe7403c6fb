//! The requests of a queue, by tag: what each waits for, and what is to be done next. No I/O.
//!
//! ```text
//!                                          ┌── copy in ── Incoming ──┐
//!   Awaited ── arrived ──▶ is it sensible? ┤ write                   ├──▶ Asked ── answered ──┐
//!      ▲                        │          └── anything else ────────┘                        │
//!      │                        no                                        read ── copy out ── Outgoing
//!      └──────── commit ────────┴──────────────────────────────────────────────────────────────┘
//!
//!   Awaited ── aborted ──▶ Gone
//! ```
//!
//! Where the kernel lends the data of requests, they go to the backend as they are (`Lent`) and are
//! not copied. What the backend refuses so is done once more the other way before anybody hears of
//! it: so errors are the same, and memory that does not suit the medium is no error.

use base::{Answer, Operation, Outcome, Request, Segment};
use wire::ublk::Descriptor;
use wire::ublk::queue::{ABORTED, ARRIVED};

use super::disk::{Ask, Disk, EIO};

/// All tags of a queue.
#[derive(Debug)]
pub(super) struct Tags {
    disk: Disk,
    states: Box<[State]>,
    /// The memory of each tag.
    places: Box<[Segment]>,
    /// The data of all requests, each at the place of its tag, as far as the kernel lends them.
    lent: Option<Segment>,
    /// How many requests were refused so.
    refusals: u32,
    /// The part of it that a request moves, by tag: the table that requests point into.
    segments: Box<[Segment]>,
    /// What the backend is to do next.
    requests: Vec<Request>,
    /// Requests that the backend has.
    in_flight: usize,
    /// Tags that the kernel has not taken back.
    left: usize,
    done: Done,
    trouble: Option<String>,
}

/// What a tag waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A request.
    Awaited,
    /// The data of a write.
    Incoming(Ask),
    /// The backend.
    Asked(Ask),
    /// The backend, which has the data of the kernel itself.
    Lent(Ask),
    /// The data of a read, on their way to who asked.
    Outgoing(Ask),
    /// Nothing any more.
    Gone,
}

/// What is to be done next about a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing just now.
    Nothing,
    /// The data of its request are to be copied here; then [`Tags::copied`].
    CopyIn { tag: u16, into: Segment },
    /// From here they are to be copied to its request; then [`Tags::copied`].
    CopyOut { tag: u16, from: Segment },
    /// The kernel is to be told that it has ended so.
    Commit { tag: u16, result: i32 },
}

/// What was done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Requests that have ended well.
    pub good: u64,
    /// Requests that have ended with an error.
    pub failed: u64,
    /// Bytes that moved between medium and request without a copy in this process.
    pub lent_bytes: u64,
    /// Bytes that moved with one.
    pub copied_bytes: u64,
}

impl Done {
    /// The same, of which so many bytes were copied by whoever had them lent.
    #[must_use]
    pub(super) fn with_copied(self, bytes: u64) -> Self {
        let bytes = bytes.min(self.lent_bytes);
        let (lent_bytes, copied_bytes) = (self.lent_bytes - bytes, self.copied_bytes + bytes);
        Self { lent_bytes, copied_bytes, ..self }
    }
}

/// As many requests may be refused without a copy; then everything is copied.
const REFUSALS_MAX: u32 = 16;

const ENODATA: i32 = 61;
const ENOLINK: i32 = 67;
const ENOSPC: i32 = 28;
const EOPNOTSUPP: i32 = 95;

impl Tags {
    /// `depth` tags, all awaited, over `memory`: of that each has as much as a request may move.
    ///
    /// # Panics
    ///
    /// If there is not so much.
    pub(super) fn new(disk: Disk, depth: u16, memory: Segment) -> Self {
        let each = disk.io_bytes_max();
        let place = |tag: u16| {
            memory.slice(u32::from(tag) * each, each).expect("memory for the data of every tag")
        };
        let places: Box<[Segment]> = (0..depth).map(place).collect();
        Self {
            disk,
            states: vec![State::Awaited; usize::from(depth)].into(),
            segments: places.clone(),
            places,
            lent: None,
            refusals: 0,
            requests: Vec::with_capacity(usize::from(depth)),
            in_flight: 0,
            left: usize::from(depth),
            done: Done::default(),
            trouble: None,
        }
    }

    /// The same, whose data the kernel lends: those of each request at the place of its tag.
    #[must_use]
    pub(super) fn with_lent(self, lent: Option<Segment>) -> Self {
        Self { lent, ..self }
    }

    /// How many there are.
    pub(super) fn depth(&self) -> u16 {
        u16::try_from(self.states.len()).unwrap_or(u16::MAX)
    }

    /// The kernel has ended the command of a tag. If there is a request, `descriptor` says which.
    #[inline]
    pub(super) fn ended(
        &mut self,
        tag: u64,
        result: i32,
        descriptor: impl FnOnce(u16) -> Descriptor,
    ) -> Step {
        let index = usize::try_from(tag).unwrap_or(usize::MAX);
        let (Some(state), Ok(tag)) = (self.states.get_mut(index), u16::try_from(tag)) else {
            return self.complain(format!("the kernel has ended tag {tag}, which there is not"));
        };
        if *state != State::Awaited {
            return self.complain(format!("the kernel has ended tag {tag}, which it did not have"));
        }
        if result == ARRIVED {
            return self.arrived(tag, &descriptor(tag));
        }
        *state = State::Gone;
        self.left -= 1;
        if result == ABORTED {
            return Step::Nothing;
        }
        self.complain(format!("the kernel has refused a command of tag {tag}: {result}"))
    }

    #[inline]
    fn arrived(&mut self, tag: u16, asked: &Descriptor) -> Step {
        let ask = match self.disk.admit(asked) {
            Ok(ask) => ask,
            Err(error) => return self.commit(tag, -error),
        };
        let index = usize::from(tag);
        if ask.len_bytes == 0 {
            self.ask(tag, ask, State::Asked(ask));
            return Step::Nothing;
        }
        let Some(lent) = self.lent else { return self.begin_copied(tag, ask) };
        let offset = lent.offset + u64::from(tag) * u64::from(self.disk.io_bytes_max());
        self.segments[index] = Segment { offset, len_bytes: ask.len_bytes, ..lent };
        self.ask(tag, ask, State::Lent(ask));
        Step::Nothing
    }

    /// Data go through memory of ours.
    #[inline]
    fn begin_copied(&mut self, tag: u16, ask: Ask) -> Step {
        let index = usize::from(tag);
        self.segments[index] = Segment { len_bytes: ask.len_bytes, ..self.places[index] };
        if ask.operation == Operation::Write {
            self.states[index] = State::Incoming(ask);
            return Step::CopyIn { tag, into: self.segments[index] };
        }
        self.ask(tag, ask, State::Asked(ask));
        Step::Nothing
    }

    /// The data of a tag were copied, or could not be.
    #[inline]
    pub(super) fn copied(&mut self, tag: u16, is_done: bool) -> Step {
        let state = self.states[usize::from(tag)];
        match state {
            State::Incoming(ask) if is_done => {
                self.ask(tag, ask, State::Asked(ask));
                Step::Nothing
            }
            State::Outgoing(ask) if is_done => self.commit_copied(tag, ask),
            State::Incoming(_) | State::Outgoing(_) => self.commit(tag, -EIO),
            State::Awaited | State::Asked(_) | State::Lent(_) | State::Gone => Step::Nothing,
        }
    }

    /// The backend has answered.
    #[inline]
    pub(super) fn answered(&mut self, answer: Answer) -> Step {
        let index = usize::try_from(answer.token).unwrap_or(usize::MAX);
        let (ask, is_lent) = match self.states.get(index) {
            Some(State::Asked(ask)) => (*ask, false),
            Some(State::Lent(ask)) => (*ask, true),
            _ => {
                return self.complain(format!("the device has answered {}, unasked", answer.token));
            }
        };
        self.in_flight -= 1;
        let tag = u16::try_from(index).unwrap_or(u16::MAX);
        if is_lent {
            return self.answered_lent(tag, ask, answer.outcome);
        }
        if !answer.outcome.is_success() {
            return self.commit(tag, -error(answer.outcome));
        }
        if ask.operation == Operation::Read {
            self.states[index] = State::Outgoing(ask);
            return Step::CopyOut { tag, from: self.segments[index] };
        }
        self.commit_copied(tag, ask)
    }

    /// The backend has answered a request whose data it had of the kernel itself.
    #[inline]
    fn answered_lent(&mut self, tag: u16, ask: Ask, outcome: Outcome) -> Step {
        if outcome.is_success() {
            self.done.lent_bytes += u64::from(ask.len_bytes);
            return self.commit(tag, moved(ask));
        }
        if outcome == Outcome::PATH_ERROR {
            // What is out of reach is so for copies, too.
            return self.commit(tag, -error(outcome));
        }
        self.begin_again(tag, ask, outcome)
    }

    #[cold]
    fn begin_again(&mut self, tag: u16, ask: Ask, outcome: Outcome) -> Step {
        self.refusals += 1;
        if self.refusals == 1 {
            let operation = ask.operation;
            self.complain(format!(
                "the device has answered a {} of {} bytes without a copy with {outcome}: \
                 what is refused so is copied",
                operation.name(),
                ask.len_bytes
            ));
        }
        if self.refusals == REFUSALS_MAX && self.lent.take().is_some() {
            self.complain(format!(
                "{REFUSALS_MAX} requests were refused without a copy: from now on all are copied"
            ));
        }
        self.begin_copied(tag, ask)
    }

    /// What the backend is to do next, and the table of all tags that it points into.
    #[inline]
    pub(super) fn requests(&self) -> (&[Request], &[Segment]) {
        (&self.requests, &self.segments)
    }

    /// The backend has taken so many of them, off the front.
    #[inline]
    pub(super) fn taken(&mut self, count: usize) {
        self.in_flight += count;
        self.requests.drain(..count);
    }

    /// Requests that the backend has.
    #[inline]
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Whether the kernel has taken all tags back.
    #[inline]
    pub(super) fn is_over(&self) -> bool {
        self.left == 0
    }

    pub(super) fn done(&self) -> Done {
        self.done
    }

    /// What somebody did that nobody may do, once; of several things the first.
    #[inline]
    pub(super) fn next_trouble(&mut self) -> Option<String> {
        self.trouble.take()
    }

    #[inline]
    fn ask(&mut self, tag: u16, ask: Ask, state: State) {
        self.states[usize::from(tag)] = state;
        self.requests.push(Request {
            token: u64::from(tag),
            lba: ask.lba,
            operand: 0,
            segment_first: u32::from(tag),
            blocks: ask.blocks,
            segment_count: u16::from(ask.len_bytes > 0),
            metadata_count: 0,
            operation: ask.operation,
            flags: ask.flags,
        });
    }

    /// Data that were copied have arrived.
    #[inline]
    fn commit_copied(&mut self, tag: u16, ask: Ask) -> Step {
        self.done.copied_bytes += u64::from(ask.len_bytes);
        self.commit(tag, moved(ask))
    }

    #[inline]
    fn commit(&mut self, tag: u16, result: i32) -> Step {
        self.states[usize::from(tag)] = State::Awaited;
        let count = if result < 0 { &mut self.done.failed } else { &mut self.done.good };
        *count += 1;
        Step::Commit { tag, result }
    }

    #[cold]
    fn complain(&mut self, text: String) -> Step {
        self.trouble.get_or_insert(text);
        Step::Nothing
    }
}

/// What a request that went well is answered with: how many bytes it has moved.
#[inline]
fn moved(ask: Ask) -> i32 {
    i32::try_from(ask.len_bytes).unwrap_or(i32::MAX)
}

/// The error number whose meaning for the kernel's block layer is nearest (`blk_errors`).
#[cold]
fn error(outcome: Outcome) -> i32 {
    match outcome {
        Outcome::INVALID_OPCODE => EOPNOTSUPP,
        Outcome::CAPACITY_EXCEEDED => ENOSPC,
        Outcome::UNRECOVERED_READ => ENODATA,
        Outcome::PATH_ERROR => ENOLINK,
        _ => EIO,
    }
}
