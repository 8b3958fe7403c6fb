//! A connection without its socket: bytes in, requests out; answers in, bytes out.

use std::sync::Arc;

use base::{Answer, Memory, Request, Segment};
use dma::Regions;
use wire::nbd::{ErrorCode, Extent, Greeting};

use super::exchange::{Done, Exchange, Question};
use super::export::Export;
use super::haggling::{FLAGS, Haggled, Haggling};
use super::inbox::Inbox;
use super::memory::{Layout, cut};
use super::outbox::Outbox;
use super::pool::Pool;

/// The server's end of a connection. It does no I/O: whoever has it moves bytes between a socket
/// and the segments that it names, and requests between it and a backend.
#[derive(Debug)]
pub struct Connection {
    export: Arc<Export>,
    regions: Regions,
    layout: Layout,
    /// Where memory for large requests is leased from.
    pool: Arc<Pool>,
    inbox: Inbox,
    outbox: Outbox,
    phase: Phase,
    /// Where to receive into; built anew for each call.
    into: Vec<Segment>,
    /// Something has changed since the last step, so that it may come further.
    may_step: bool,
    ending: Option<Ending>,
    /// What the client did that ended it, if it was the client.
    left: Option<Left>,
}

#[derive(Debug)]
enum Phase {
    Haggling(Haggling),
    Exchange(Box<Exchange>),
}

/// Nothing more is received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// What is under way is brought to its end, and answered.
    InOrder,
    /// There is nobody left to answer.
    Broken,
}

/// How a client ends a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// By saying so.
    Said,
    /// By choosing nothing, or what there is not.
    NothingChosen,
    /// By sending what makes no sense.
    Nonsense,
}

/// Segments of the longest list to receive into: the largest payload, and the inbox.
const INTO: usize = 160;

impl Connection {
    /// A connection that has just been made: it has its greeting to send. `memory` is
    /// [`MEMORY_BYTES`](super::MEMORY_BYTES) of `regions`, and its own as long as it lives; `pool` is of
    /// the same regions.
    ///
    /// # Panics
    ///
    /// If the memory is shorter, or does not exist.
    pub fn new(export: Arc<Export>, regions: Regions, memory: Segment, pool: Arc<Pool>) -> Self {
        let layout = Layout::new(memory);
        let mut connection = Self {
            export,
            regions,
            layout,
            pool,
            inbox: Inbox::new(layout.inbox()),
            outbox: Outbox::new(),
            phase: Phase::Haggling(Haggling::new()),
            into: Vec::with_capacity(INTO),
            may_step: false,
            ending: None,
            left: None,
        };
        connection.say(&Greeting { flags: FLAGS }.to_bytes());
        connection
    }

    /// Queues what the handshake says. All it had said before has been sent.
    fn say(&mut self, bytes: &[u8]) {
        let len_bytes = u32::try_from(bytes.len()).expect("answers to options are short");
        let segment = cut(self.layout.words(), 0, len_bytes);
        self.regions
            .store(segment, bytes)
            .expect("a connection has its memory as long as it lives");
        self.outbox.push(segment);
    }

    /// Where the next bytes belong. Empty if there is no room for more just now, or nothing more is
    /// expected: then nothing must be received.
    #[inline]
    pub fn receive_into(&mut self) -> &[Segment] {
        self.into.clear();
        if self.ending.is_none() {
            self.inbox.tidy(&self.regions);
            if let Phase::Exchange(exchange) = &self.phase {
                exchange.payload_into(&mut self.into);
            }
            let room = self.inbox.room();
            if room.len_bytes > 0 {
                self.into.push(room);
            }
        }
        &self.into
    }

    /// So many bytes have been received there.
    #[inline]
    pub fn received(&mut self, count: usize) {
        let count = u32::try_from(count).expect("no more than there was room for");
        let rest = match &mut self.phase {
            Phase::Exchange(exchange) => exchange.payload_received(count),
            Phase::Haggling(_) => count,
        };
        self.inbox.received(rest);
        self.may_step = true;
    }

    /// Nothing more will be received. What is under way is brought to its end.
    pub fn receive_end(&mut self) {
        self.end(Ending::InOrder);
    }

    /// Nothing can be sent any more. What is under way is forgotten when the backend has let go of
    /// it.
    pub fn broken(&mut self) {
        self.end(Ending::Broken);
    }

    fn end(&mut self, ending: Ending) {
        if self.ending.is_none()
            && let Phase::Exchange(exchange) = &mut self.phase
        {
            exchange.cut_off();
        }
        if self.ending != Some(Ending::Broken) {
            self.ending = Some(ending);
        }
    }

    /// Goes on as far as it can with what it has. Returns how many things it has done.
    #[inline]
    pub fn step(&mut self) -> usize {
        if !self.may_step {
            return 0;
        }
        self.may_step = false;
        match &mut self.phase {
            Phase::Exchange(_) => self.step_exchange(),
            Phase::Haggling(_) => self.step_haggling(),
        }
    }

    fn step_exchange(&mut self) -> usize {
        let Phase::Exchange(exchange) = &mut self.phase else { return 0 };
        let mut count = 0;
        if self.ending.is_none() {
            match exchange.take_in(&mut self.inbox, &mut self.outbox) {
                Ok(taken) => count += taken,
                // Nobody knows where the next request begins ("Terminating the transmission phase").
                Err(_) => {
                    self.left = Some(Left::Nonsense);
                    self.end(Ending::InOrder);
                }
            }
        }
        let Phase::Exchange(exchange) = &mut self.phase else { return count };
        count += exchange.fill();
        if exchange.is_ended() && self.ending.is_none() {
            self.ending = Some(Ending::InOrder);
            self.left = Some(Left::Said);
        }
        count
    }

    fn step_haggling(&mut self) -> usize {
        let mut count = 0;
        let mut words = Vec::new();
        while self.outbox.is_empty() && self.ending.is_none() {
            let Phase::Haggling(haggling) = &mut self.phase else { return count };
            words.clear();
            let haggled = haggling.step(&mut self.inbox, &self.regions, &self.export, &mut words);
            if !words.is_empty() {
                self.say(&words);
            }
            match haggled {
                Haggled::Nothing => break,
                Haggled::Step => {}
                Haggled::Over => {
                    self.left = Some(Left::NothingChosen);
                    self.end(Ending::InOrder);
                }
                Haggled::Agreed(terms) => {
                    let (export, regions) = (Arc::clone(&self.export), self.regions.clone());
                    let pool = Arc::clone(&self.pool);
                    let exchange = Exchange::new(export, terms, regions, self.layout, pool);
                    self.phase = Phase::Exchange(Box::new(exchange));
                    self.may_step = true;
                }
            }
            count += 1;
        }
        count
    }

    /// Whether [`step`](Self::step) may come further.
    #[inline]
    pub fn can_step(&self) -> bool {
        self.may_step
    }

    /// Whether the client still has to choose an export.
    pub fn is_haggling(&self) -> bool {
        matches!(self.phase, Phase::Haggling(_))
    }

    /// What the backend is to do, and the table of its segments.
    #[inline]
    pub fn requests(&self) -> (&[Request], &[Segment]) {
        match &self.phase {
            Phase::Exchange(exchange) if self.ending != Some(Ending::Broken) => exchange.requests(),
            _ => (&[], &[]),
        }
    }

    /// The backend has taken so many of these requests, off the front.
    #[inline]
    pub fn taken(&mut self, count: usize) {
        let Phase::Exchange(exchange) = &mut self.phase else { return };
        exchange.taken(count);
        self.may_step |= exchange.has_queue();
    }

    /// Requests that the backend has and has not answered. While there are any, it may touch the
    /// connection's memory.
    #[inline]
    pub fn in_flight(&self) -> usize {
        match &self.phase {
            Phase::Exchange(exchange) => exchange.in_flight(),
            Phase::Haggling(_) => 0,
        }
    }

    /// The backend has answered a request.
    #[inline]
    pub fn answer(&mut self, answer: Answer) {
        if let Phase::Exchange(exchange) = &mut self.phase {
            exchange.answer(answer, &mut self.outbox);
            self.may_step |= exchange.has_queue();
        }
    }

    /// The next question that a client has which takes its time.
    pub fn next_question(&mut self) -> Option<Question> {
        match &mut self.phase {
            Phase::Exchange(exchange) => exchange.next_question(),
            Phase::Haggling(_) => None,
        }
    }

    /// The answer to the question of `slot`: extents one behind the other from its first byte on,
    /// or none if it could not be found out.
    pub fn surveyed(&mut self, slot: u16, extents: &[Extent]) {
        if let Phase::Exchange(exchange) = &mut self.phase {
            exchange.surveyed(slot, extents, &mut self.outbox);
        }
    }

    /// The answer to the question of `slot` for another size: whether the export has it now.
    pub fn resized(&mut self, slot: u16, done: Result<(), ErrorCode>) {
        if let Phase::Exchange(exchange) = &mut self.phase {
            exchange.resized(slot, done, &mut self.outbox);
        }
    }

    /// What is to be sent.
    #[inline]
    pub fn to_send(&self) -> &[Segment] {
        self.outbox.to_send()
    }

    /// So many bytes of it have been sent.
    #[inline]
    pub fn sent(&mut self, count: usize) {
        match &mut self.phase {
            Phase::Exchange(exchange) => {
                let may_step = &mut self.may_step;
                self.outbox.sent(count, |slot| {
                    exchange.give_back(slot);
                    *may_step = true;
                });
            }
            Phase::Haggling(_) => {
                self.outbox.sent(count, |_| {});
                self.may_step |= self.outbox.is_empty();
            }
        }
    }

    /// The number of the request of which a part has come and the rest is awaited from the client.
    #[inline]
    pub fn awaited(&self) -> Option<u64> {
        match &self.phase {
            Phase::Exchange(exchange) if self.ending.is_none() => exchange.awaited(&self.inbox),
            _ => None,
        }
    }

    /// Whether a request waits for memory that other connections have: it is to
    /// [try again](Self::try_again) after a while.
    #[inline]
    pub fn waits_for_memory(&self) -> bool {
        matches!(&self.phase, Phase::Exchange(exchange) if exchange.waits_for_memory())
    }

    /// The next step asks for memory again.
    pub fn try_again(&mut self) {
        if let Phase::Exchange(exchange) = &mut self.phase {
            exchange.try_again();
            self.may_step = true;
        }
    }

    /// Gives memory back that is not used: before a sleep.
    pub fn release(&mut self) {
        if let Phase::Exchange(exchange) = &mut self.phase {
            exchange.release();
        }
    }

    /// What the client did that ended it, if it was the client who did something.
    pub(super) fn left(&self) -> Option<Left> {
        self.left
    }

    /// What was answered.
    #[inline]
    pub fn done(&self) -> Done {
        match &self.phase {
            Phase::Exchange(exchange) => *exchange.done(),
            Phase::Haggling(_) => Done::default(),
        }
    }

    /// Requests whose answers have not been sent.
    #[inline]
    pub fn under_way(&self) -> usize {
        match &self.phase {
            Phase::Exchange(exchange) => exchange.under_way(),
            Phase::Haggling(_) => 0,
        }
    }

    /// Whether it ends: nothing more is received.
    pub fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    /// Whether all is done, and the socket is to be closed.
    #[inline]
    pub fn is_over(&self) -> bool {
        let idle = match &self.phase {
            Phase::Exchange(exchange) => exchange.is_idle(),
            Phase::Haggling(_) => true,
        };
        match self.ending {
            None => false,
            Some(Ending::InOrder) => idle && self.outbox.is_empty(),
            Some(Ending::Broken) => self.in_flight() == 0,
        }
    }
}
