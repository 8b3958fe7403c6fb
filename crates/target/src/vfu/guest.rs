//! The client, and what it does to the device.
//!
//! ```text
//!   Absent ── accepted ──▶ Here ── gone, or refused ──▶ Leaving ── nothing touches its memory ──▶ Absent
//! ```
//!
//! Its socket is closed at the very end: a client that waits for that knows that its memory is its own.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use base::{Instant, Span};
use dma::{Adopted, FilePart, Regions};
use host::Line;
use host::local_socket::{Connection, Received};
use host::watch::Interest;
use vfu::server::{Call, DmaMap};
use vfu::{Errno, IrqData, IrqSet, Request, Server, Violation, irq_index};

use super::device::Device;
use super::lines::Lines;
use super::memory::{Access, Maps, Question};
use crate::news::News;

/// The device and whoever has it.
pub(super) struct Guest {
    pub(super) device: Device,
    maps: Maps,
    lines: Lines,
    regions: Regions,
    state: State,
    told: SyncSender<News>,
    /// How much could not be told.
    untold: u64,
    /// What this client has done wrong, in times.
    troubles: u64,
    /// Bytes on their way in.
    buffer: Box<[u8]>,
}

enum State {
    Absent,
    Here(Box<Session>),
    Leaving(Leaving),
}

/// A client that has gone, and whose memory is not let go of yet.
struct Leaving {
    connection: Connection,
    /// How long the medium may take.
    until: Instant,
    /// It has taken longer, and somebody was told.
    is_late: bool,
}

/// A connection and what is under way on it.
struct Session {
    connection: Connection,
    server: Server<File>,
    busy_with: Option<Busy>,
    /// Accesses by message whose rest is still to go, by token.
    accesses: BTreeMap<u32, Part>,
    /// There has been one.
    goes_by_message: bool,
    /// Until when its first message, or the rest of one, has to be there.
    whole_by: Instant,
}

type File = Arc<OwnedFd>;

/// A command that takes longer, and how long it may.
struct Busy {
    pending: Pending,
    until: Instant,
    /// It has taken longer, and somebody was told.
    is_late: bool,
}

/// What it is.
enum Pending {
    Unmap { call: Call, iova: u64 },
    Reset { call: Call },
}

/// How far an access by message has got.
struct Part {
    question: Question,
    done_bytes: usize,
    data: Vec<u8>,
}

/// Why a client was sent away; none if it went.
type Over = Option<String>;

/// As much is taken from a socket in one turn.
const MESSAGES_PER_TURN: usize = 64;
const BUFFER_BYTES: usize = 256 << 10;

impl Guest {
    pub(super) fn new(
        device: Device,
        maps: Maps,
        lines: Lines,
        regions: Regions,
        told: SyncSender<News>,
    ) -> Self {
        let buffer = vec![0; BUFFER_BYTES].into();
        Self {
            device,
            maps,
            lines,
            regions,
            state: State::Absent,
            told,
            untold: 0,
            troubles: 0,
            buffer,
        }
    }

    /// Whether nobody has the device, and nothing of whoever had it is left.
    pub(super) fn is_free(&self) -> bool {
        matches!(self.state, State::Absent)
    }

    /// Whether something of whoever had it is left, and not for long: who comes meanwhile waits at
    /// the door.
    pub(super) fn is_leaving(&self) -> bool {
        matches!(&self.state, State::Leaving(leaving) if !leaving.is_late)
    }

    /// Gives the device to whoever has come.
    pub(super) fn enter(&mut self, now: Instant, connection: Connection) {
        let peer = connection.peer().map_or(0, |peer| peer.pid);
        if let Err(why) = self.device.welcome() {
            return self.tell(News::Trouble(format!("process {peer} is not let in: {why}")));
        }
        self.tell(News::Came(format!("process {peer}")));
        let server = Server::new(self.device.shape());
        let accesses = BTreeMap::new();
        let session = Session {
            connection,
            server,
            busy_with: None,
            accesses,
            goes_by_message: false,
            whole_by: now.after(MESSAGE_MAX),
        };
        self.state = State::Here(Box::new(session));
    }

    /// Sends a client away that has the device and does not begin, or does not end a message, so that
    /// another can have it. How much that was.
    pub(super) fn expire(&mut self, now: Instant) -> usize {
        if now < self.wake_at() {
            return 0;
        }
        let has_begun = matches!(&self.state, State::Here(session) if session.server.has_version());
        let why = match has_begun {
            true => format!("a message was not whole after {MESSAGE_MAX}"),
            false => format!("it sent no VERSION for {MESSAGE_MAX}, expected it first"),
        };
        self.part(now, Some(why));
        1
    }

    /// When that is.
    pub(super) fn wake_at(&self) -> Instant {
        match &self.state {
            // What it sends is not taken while it takes nothing itself.
            State::Here(session) if session.server.wanted() == 0 => Instant::NEVER,
            State::Here(session) => session.whole_by,
            State::Leaving(_) | State::Absent => Instant::NEVER,
        }
    }

    /// The socket of whoever has the device, and what is waited for there.
    pub(super) fn wanted(&self) -> Option<(BorrowedFd<'_>, Interest)> {
        let State::Here(session) = &self.state else { return None };
        let readable = session.server.wanted() > 0;
        let writable = session.server.outgoing().is_some();
        Some((session.connection.as_fd(), Interest { readable, writable }))
    }

    /// The socket of whoever had the device and is leaving: nothing is waited for there.
    pub(super) fn parting(&self) -> Option<BorrowedFd<'_>> {
        match &self.state {
            State::Leaving(leaving) => Some(leaving.connection.as_fd()),
            _ => None,
        }
    }

    /// Whether a command or a farewell awaits the controller, and not for long: what is late wakes
    /// whoever sleeps by itself.
    pub(super) fn is_in_motion(&self) -> bool {
        match &self.state {
            State::Here(session) => session.busy_with.as_ref().is_some_and(|busy| !busy.is_late),
            State::Leaving(leaving) => !leaving.is_late,
            State::Absent => false,
        }
    }

    /// Takes what has come by the socket, and does it. How much that was.
    pub(super) fn hear(&mut self, now: Instant) -> usize {
        let mut session = match std::mem::replace(&mut self.state, State::Absent) {
            State::Here(session) => session,
            other => {
                self.state = other;
                return 0;
            }
        };
        let heard = self.hear_session(now, &mut session);
        self.state = State::Here(session);
        match heard {
            Ok(count) => count,
            Err(over) => {
                self.part(now, over);
                1
            }
        }
    }

    fn hear_session(&mut self, now: Instant, session: &mut Session) -> Result<usize, Over> {
        let mut count = 0;
        for _ in 0..MESSAGES_PER_TURN {
            if !session.receive(now, &mut self.buffer)? {
                break;
            }
            count += 1;
            while let Some(request) = session.server.next_request().map_err(said)? {
                self.serve(now, session, request);
            }
        }
        Ok(count)
    }

    /// Goes on with what takes longer, and sends what is to be sent. How much that was.
    #[inline]
    pub(super) fn go_on(&mut self, now: Instant) -> usize {
        let is_quiet = match &self.state {
            State::Absent => true,
            State::Leaving(_) => false,
            State::Here(session) => {
                session.busy_with.is_none()
                    && session.server.outgoing().is_none()
                    && !self.maps.has_questions()
            }
        };
        if is_quiet { 0 } else { self.go_on_slowly(now) }
    }

    #[cold]
    fn go_on_slowly(&mut self, now: Instant) -> usize {
        match std::mem::replace(&mut self.state, State::Absent) {
            State::Absent => 0,
            State::Leaving(leaving) => {
                self.state = State::Leaving(leaving);
                self.farewell(now)
            }
            State::Here(mut session) => {
                let finished = self.finish_pending(now, &mut session);
                let asked = self.ask(&mut session);
                let sent = session.send();
                self.state = State::Here(session);
                match finished.and_then(|finished| Ok(finished + asked + sent?)) {
                    Ok(count) => count,
                    Err(over) => {
                        self.part(now, over);
                        1
                    }
                }
            }
        }
    }

    /// Looks whether the client has taken memory back without a word.
    pub(super) fn look_after_memory(&mut self, now: Instant) {
        if let Some(iova) = self.maps.failed() {
            let text = format!("memory at {iova:#x} was made shorter than it was said to be");
            self.part(now, Some(text));
        }
    }

    /// Sends whoever is here away: the service ends.
    pub(super) fn leave(&mut self, now: Instant) {
        if matches!(self.state, State::Here(_)) {
            self.part(now, Some("the service ends".to_owned()));
        }
    }

    /// Lets the client go. Its memory is let go once nothing touches it.
    fn part(&mut self, now: Instant, why: Over) {
        self.state = match std::mem::replace(&mut self.state, State::Absent) {
            // With the session its descriptors are closed.
            State::Here(session) => {
                let (connection, until) = (session.connection, now.after(FAREWELL));
                State::Leaving(Leaving { connection, until, is_late: false })
            }
            other => {
                self.state = other;
                return;
            }
        };
        self.lines.clear();
        self.maps.unmap_all();
        self.device.front.hold(false);
        self.device.disable(now);
        if let Some(more) = self.troubles.checked_sub(TROUBLES_MAX).filter(|more| *more > 0) {
            self.tell(News::Trouble(format!("{more} more of the same client")));
        }
        self.troubles = 0;
        self.tell(News::Left(why));
    }

    fn farewell(&mut self, now: Instant) -> usize {
        if !self.device.is_disabled() {
            if let State::Leaving(leaving) = &mut self.state
                && !leaving.is_late
                && now >= leaving.until
            {
                leaving.is_late = true;
                let text = format!(
                    "a medium has not answered for {FAREWELL}: until it does the client's memory \
                     is kept, and nobody else is let in"
                );
                self.tell(News::Trouble(text));
            }
            return 0;
        }
        self.maps.release_all();
        self.device.reset();
        self.state = State::Absent;
        1
    }

    /// Tells of something that the client has done wrong, unless it does so all the time.
    fn trouble(&mut self, text: String) {
        self.troubles += 1;
        if self.troubles <= TROUBLES_MAX {
            self.tell(News::Trouble(text));
        }
    }

    /// If nobody listens, nobody wants to know; who listens too slowly is told how much it missed.
    fn tell(&mut self, news: News) {
        if self.untold > 0 {
            let text = format!("{} things more than could be told", self.untold);
            if self.told.try_send(News::Trouble(text)).is_ok() {
                self.untold = 0;
            }
        }
        self.untold += u64::from(self.told.try_send(news).is_err());
    }

    fn serve(&mut self, now: Instant, session: &mut Session, request: Request<File>) {
        let server = &mut session.server;
        match request {
            Request::Map { call, map, file } => match self.map(map, file) {
                Ok(()) => server.done(call),
                Err((errno, text)) => {
                    self.trouble(text);
                    server.refuse(call, errno);
                }
            },
            Request::Unmap { call, iova, len_bytes } => {
                if self.device.is_disabled() {
                    self.maps.forget_rings();
                }
                if !self.maps.unmap(iova, len_bytes) {
                    return server.refuse(call, Errno::NO_ENTRY);
                }
                self.device.front.hold(true);
                session.busy_with = Some(Busy::new(now, Pending::Unmap { call, iova }));
            }
            Request::SetIrqs { call, irqs } => match self.set_irqs(irqs) {
                Ok(()) => server.done(call),
                Err(text) => {
                    self.trouble(text);
                    server.refuse(call, Errno::INVALID);
                }
            },
            Request::Read { call, region, offset, len_bytes } => {
                let mut data = vec![0; len_bytes as usize];
                self.device.read(region, offset, &mut data);
                server.data(call, &data);
            }
            Request::Write { call, region, offset, data } => {
                if self.device.write(now, region, offset, &data) {
                    self.device.disable(now);
                    session.busy_with = Some(Busy::new(now, Pending::Reset { call }));
                    return;
                }
                server.done(call);
            }
            Request::Reset { call } => {
                self.device.disable(now);
                session.busy_with = Some(Busy::new(now, Pending::Reset { call }));
            }
            Request::DmaRead { token, data } => self.arrived(session, token, data),
            Request::DmaWritten { token, result } => {
                self.arrived(session, token, result.map(|()| Vec::new()));
            }
        }
    }

    fn map(&mut self, map: DmaMap, file: Option<File>) -> Result<(), (Errno, String)> {
        // What is to be read only, or written only, is reached by message: so a file that cannot be
        // mapped for both is none too few.
        let file = file.filter(|_| map.is_readable && map.is_writable);
        let memory = file.map(|file| self.adopt(&map, &file)).transpose()?;
        self.maps.map(map, memory).map_err(|refused| (refused.errno, refused.text))
    }

    fn adopt(&self, map: &DmaMap, file: &OwnedFd) -> Result<Adopted, (Errno, String)> {
        let DmaMap { iova, len_bytes, file_offset: offset, .. } = *map;
        let part = FilePart { offset, len_bytes };
        self.maps.has_room(len_bytes).map_err(|refused| (refused.errno, refused.text))?;
        let adopted = self.regions.adopt(file.as_fd(), part);
        adopted.map_err(|why| (Errno::INVALID, format!("memory at {iova:#x}: {why}")))
    }

    fn set_irqs(&self, irqs: IrqSet<File>) -> Result<(), String> {
        let IrqSet { index, start, count, action, data } = irqs;
        if index != irq_index::MSIX {
            // Of errors and requests nobody is told, so who wants to hear of them may.
            return Ok(());
        }
        let data = match data {
            IrqData::All => IrqData::All,
            IrqData::Some(which) => IrqData::Some(which),
            IrqData::Files(files) => {
                let line = |file: File| Line::new(file.try_clone()?);
                let lines: Result<Vec<_>, std::io::Error> = files.into_iter().map(line).collect();
                IrqData::Files(lines.map_err(|error| format!("vector {start}: {error}"))?)
            }
        };
        self.lines.set(start, count, action, data);
        Ok(())
    }

    /// Answers a command that takes longer, if it is done.
    fn finish_pending(&mut self, now: Instant, session: &mut Session) -> Result<usize, Over> {
        let Some(busy) = &mut session.busy_with else { return Ok(0) };
        let is_done = match busy.pending {
            Pending::Unmap { .. } => !self.maps.awaits_cut() && self.device.front.is_quiet(),
            Pending::Reset { .. } => self.device.is_disabled(),
        };
        if !is_done {
            if !busy.is_late && now >= busy.until {
                busy.is_late = true;
                let who =
                    if session.accesses.is_empty() { "a medium" } else { "the client itself" };
                let what = &busy.pending;
                let text = format!("{who} has not answered for {FAREWELL}: {what} waits for it");
                self.tell(News::Trouble(text));
            }
            return Ok(0);
        }
        match session.busy_with.take().map(|busy| busy.pending) {
            Some(Pending::Unmap { call, iova }) => {
                self.maps.release(iova);
                self.device.front.hold(false);
                session.server.done(call);
            }
            Some(Pending::Reset { call }) => {
                self.maps.forget_rings();
                self.device.reset();
                session.server.done(call);
            }
            None => {}
        }
        // Commands may wait behind it.
        let mut count = 1;
        while let Some(request) = session.server.next_request().map_err(said)? {
            self.serve(now, session, request);
            count += 1;
        }
        Ok(count)
    }

    /// Carries accesses by message to the socket, each a part at a time.
    fn ask(&mut self, session: &mut Session) -> usize {
        let mut count = 0;
        while let Some(question) = self.maps.next_question() {
            if !session.goes_by_message {
                session.goes_by_message = true;
                let text = format!(
                    "memory at {:#x} came without a descriptor, or not for reading and writing, and is \
                     reached by message, which is slow: share it (QEMU: share=on)",
                    question.iova
                );
                self.trouble(text);
            }
            let token = question.token;
            let part = Part { question, done_bytes: 0, data: Vec::new() };
            session.ask_for(&part);
            session.accesses.insert(token, part);
            count += 1;
        }
        count
    }

    fn arrived(&mut self, session: &mut Session, token: u32, data: Result<Vec<u8>, Errno>) {
        let Some(mut part) = session.accesses.remove(&token) else { return };
        match data {
            Err(errno) => self.maps.answered(token, Err(errno)),
            Ok(data) => {
                part.done_bytes += session.part_bytes(&part);
                part.data.extend(data);
                if part.done_bytes >= part.len_bytes() {
                    self.maps.answered(token, Ok(part.data));
                } else {
                    session.ask_for(&part);
                    session.accesses.insert(token, part);
                }
            }
        }
    }
}

impl Busy {
    fn new(now: Instant, pending: Pending) -> Self {
        Self { pending, until: now.after(FAREWELL), is_late: false }
    }
}

impl fmt::Display for Pending {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unmap { iova, .. } => write!(out, "DMA_UNMAP at {iova:#x}"),
            Self::Reset { .. } => out.write_str("a reset"),
        }
    }
}

impl Session {
    /// Takes bytes from the socket. False if there are none now.
    fn receive(&mut self, now: Instant, buffer: &mut [u8]) -> Result<bool, Over> {
        let wanted = self.server.wanted().min(buffer.len());
        if wanted == 0 {
            return Ok(false);
        }
        let mut files = Vec::new();
        let files_max = vfu::Capabilities::OURS.files_max as usize;
        let received = self.connection.receive_files(&mut buffer[..wanted], &mut files, files_max);
        match received.map_err(|error| Some(error.to_string()))? {
            Received::Nothing => Ok(false),
            Received::End => Err(None),
            Received::Bytes(count) => {
                let files = files.into_iter().map(Arc::new);
                self.server.receive(&buffer[..count], files).map_err(said)?;
                self.whole_by = match self.server.is_amid() {
                    true => self.whole_by.min(now.after(MESSAGE_MAX)),
                    false => Instant::NEVER,
                };
                Ok(true)
            }
        }
    }

    fn send(&mut self) -> Result<usize, Over> {
        let mut count = 0;
        while let Some(outgoing) = self.server.outgoing() {
            let files: Vec<BorrowedFd<'_>> =
                outgoing.files.iter().map(|file| file.as_fd()).collect();
            let sent = self.connection.send_files(outgoing.bytes, &files);
            let sent = sent.map_err(|error| match error.kind() {
                std::io::ErrorKind::BrokenPipe => None,
                _ => Some(error.to_string()),
            })?;
            if sent == 0 {
                break;
            }
            self.server.sent(sent);
            count += 1;
        }
        Ok(count)
    }

    /// How much of an access the next message is about.
    fn part_bytes(&self, part: &Part) -> usize {
        let most = self.server.limits().data_bytes_max.min(vfu::Capabilities::OURS.data_bytes_max);
        (part.len_bytes() - part.done_bytes).min(most as usize)
    }

    fn ask_for(&mut self, part: &Part) {
        let len = self.part_bytes(part);
        let Question { token, iova, what } = &part.question;
        let iova = iova + part.done_bytes as u64;
        match what {
            Access::Read(_) => {
                self.server.dma_read(*token, iova, u32::try_from(len).unwrap_or(0));
            }
            Access::Write(data) => {
                self.server.dma_write(*token, iova, &data[part.done_bytes..][..len]);
            }
        }
    }
}

impl Part {
    fn len_bytes(&self) -> usize {
        match &self.question.what {
            Access::Read(len_bytes) => *len_bytes as usize,
            Access::Write(data) => data.len(),
        }
    }
}

fn said(violation: Violation) -> Over {
    Some(violation.to_string())
}

/// What a client that is sent away is waited for, at most.
pub(super) const PATIENCE: Span = Span::from_secs(1);
/// How long a client may take to begin, and for the rest of a message.
const MESSAGE_MAX: Span = Span::from_secs(5);
/// How long media may take to let go of a client's memory, of some or of all, before somebody is told.
const FAREWELL: Span = Span::from_secs(5);
/// What a client does wrong is told so often.
const TROUBLES_MAX: u64 = 16;
