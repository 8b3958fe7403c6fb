//! The front end, and what it does to the disk.
//!
//! ```text
//!   Absent ── accepted ──▶ Here ── gone, or refused ──▶ Leaving ── its lanes have ended ──▶ Absent
//! ```
//!
//! Its socket is closed at the very end: a front end that waits for that knows that its memory is its
//! own.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use base::{Instant, Span};
use host::Line;
use host::local_socket::{Connection, Received};
use host::watch::Interest;
use reactor::Handle;
use vhost::{Answer, CONFIG_CHANGED, Call, MemoryChange, Request, Server, Start, Violation};

use super::memory::Table;
use super::post::Post;
use super::stand::{Inflight, Stand, make_inflight};
use crate::news::News;

/// The disk and whoever has it.
pub(super) struct Guest {
    pub(super) stand: Stand,
    state: State,
    /// What this front end has done wrong, in times.
    troubles: u64,
}

enum State {
    Absent,
    Here(Box<Session>),
    Leaving(Leaving),
}

/// A front end that has gone, and whose memory is not let go of yet.
struct Leaving {
    connection: Connection,
    lanes: BTreeMap<u16, Running>,
    patience: Patience,
}

/// A connection, and what its front end has.
pub(super) struct Session {
    connection: Connection,
    server: Server<File>,
    pub(super) table: Arc<Table>,
    pub(super) inflight: Option<Inflight>,
    pub(super) lanes: BTreeMap<u16, Running>,
    /// Whom queues call, also those that do not run.
    pub(super) calls: BTreeMap<u16, File>,
    /// Over which it is told of what it has not asked for.
    back: Option<Connection>,
    pending: Option<Pending>,
    /// Until when the rest of a message has to be there.
    whole_by: Option<Instant>,
}

/// A queue that runs, or is coming to its end.
pub(super) struct Running {
    pub(super) post: Arc<Post>,
    pub(super) thread: Handle,
    pub(super) start: Start<File>,
}

/// A message that waits until lanes have ended.
struct Pending {
    what: Wish,
    patience: Patience,
}

enum Wish {
    Stop { call: Call, queue: u16 },
    Memory { call: Call, change: MemoryChange<File> },
}

/// How long a medium may take before somebody is told.
#[derive(Clone, Copy, Debug)]
struct Patience {
    until: Instant,
    is_late: bool,
}

pub(super) type File = Arc<OwnedFd>;

/// Why a front end was sent away; none if it went.
type Over = Option<String>;

/// As much is taken from a socket in one turn.
const MESSAGES_PER_TURN: usize = 64;
/// No message is longer.
const BUFFER_BYTES: usize = 1024;
/// Descriptors that come with one.
const FILES_MAX: usize = 9;
/// How long the rest of a message may take.
pub(super) const PATIENCE: Span = Span::from_secs(5);
/// How long a medium may take to answer before somebody is told.
const FAREWELL: Span = Span::from_secs(5);
/// What a front end does wrong is told so often.
const TROUBLES_MAX: u64 = 16;

impl Guest {
    pub(super) fn new(stand: Stand) -> Self {
        Self { stand, state: State::Absent, troubles: 0 }
    }

    /// Whether nobody has the disk, and nothing of whoever had it is left.
    pub(super) fn is_free(&self) -> bool {
        matches!(self.state, State::Absent)
    }

    /// Whether something of whoever had it is left, and not for long: who comes meanwhile waits at
    /// the door.
    pub(super) fn is_leaving(&self) -> bool {
        matches!(&self.state, State::Leaving(leaving) if !leaving.patience.is_late)
    }

    /// Gives the disk to whoever has come.
    pub(super) fn enter(&mut self, now: Instant, connection: Connection) {
        let peer = connection.peer().map_or(0, |peer| peer.pid);
        self.stand.tell(News::Came(format!("process {peer}")));
        self.state = State::Here(Box::new(Session {
            connection,
            server: Server::new(self.stand.offer()),
            table: Arc::default(),
            inflight: None,
            lanes: BTreeMap::new(),
            calls: BTreeMap::new(),
            back: None,
            pending: None,
            // The first message; one that says nothing must not keep others out.
            whole_by: Some(now.after(PATIENCE)),
        }));
    }

    /// Somebody has come while another has the disk.
    pub(super) fn turn_away(&mut self, connection: &Connection) {
        let peer = connection.peer().map_or(0, |peer| peer.pid);
        let text = format!("process {peer} came while another has the disk, and was sent away");
        self.trouble(text);
    }

    /// The socket of whoever has the disk, and what is waited for there; nothing if nothing is.
    pub(super) fn wanted(&self) -> Option<(BorrowedFd<'_>, Interest)> {
        let State::Here(session) = &self.state else { return None };
        let readable = session.server.wanted() > 0;
        let writable = session.server.outgoing().is_some();
        let interest = Interest { readable, writable };
        (readable || writable).then(|| (session.connection.as_fd(), interest))
    }

    /// The socket of whoever has the disk, or had it.
    pub(super) fn socket(&self) -> Option<BorrowedFd<'_>> {
        match &self.state {
            State::Absent => None,
            State::Here(session) => Some(session.connection.as_fd()),
            State::Leaving(leaving) => Some(leaving.connection.as_fd()),
        }
    }

    /// When it has to be looked after even if nothing happens.
    pub(super) fn wake_at(&self) -> Instant {
        let of = |patience: &Patience| match patience.is_late {
            true => Instant::NEVER,
            false => patience.until,
        };
        match &self.state {
            State::Absent => Instant::NEVER,
            State::Leaving(leaving) => of(&leaving.patience),
            State::Here(session) => {
                let pending = session.pending.as_ref();
                let pending = pending.map_or(Instant::NEVER, |pending| of(&pending.patience));
                session.whole_by.unwrap_or(Instant::NEVER).min(pending)
            }
        }
    }

    /// Takes what has come by the socket, and does it. How much that was.
    pub(super) fn hear(&mut self, now: Instant) -> usize {
        self.with_session(now, |guest, session| guest.hear_session(now, session))
    }

    /// Looks after lanes, goes on with what waits for them, and sends what is to be sent. How much
    /// that was.
    pub(super) fn go_on(&mut self, now: Instant) -> usize {
        if self.stand.bell.take_resized() {
            self.resize();
        }
        if matches!(self.state, State::Leaving(_)) {
            return self.farewell(now);
        }
        self.with_session(now, |guest, session| {
            let count = guest.look_after_lanes(now, session)?;
            if session.whole_by.is_some_and(|by| by <= now) {
                return Err(Some(format!("a message was not whole after {PATIENCE}")));
            }
            Ok(count + session.send()?)
        })
    }

    /// The medium has another length: queues go by it before the front end hears of it.
    fn resize(&mut self) {
        let block_count = self.stand.medium.limits().block_count;
        self.stand.disk.resize(block_count);
        let State::Here(session) = &mut self.state else { return };
        for lane in session.lanes.values() {
            lane.post.order(|orders| orders.block_count = Some(block_count));
            lane.thread.ring();
        }
        let can_be_told = session.server.reconfigure(self.stand.config());
        let Some(back) = session.back.as_ref().filter(|_| can_be_told) else { return };
        // Where there is no room, it has not read what it was told before, and looks later.
        let sent = back.send_files(&CONFIG_CHANGED, &[]);
        if !matches!(sent, Ok(count) if count == 0 || count == CONFIG_CHANGED.len()) {
            session.back = None;
            let text = "the front end takes no message, expected that it hears of a new length";
            self.trouble(text.to_owned());
        }
    }

    fn with_session(
        &mut self,
        now: Instant,
        act: impl FnOnce(&mut Self, &mut Session) -> Result<usize, Over>,
    ) -> usize {
        let mut session = match std::mem::replace(&mut self.state, State::Absent) {
            State::Here(session) => session,
            other => {
                self.state = other;
                return 0;
            }
        };
        let acted = act(self, &mut session);
        self.state = State::Here(session);
        match acted {
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
            if !session.receive(now)? {
                break;
            }
            count += 1;
            let request = session.server.next_request().map_err(said)?;
            if let Some(violation) = session.server.take_refused() {
                self.trouble(violation.to_string());
            }
            if let Some(request) = request {
                self.serve(now, session, request)?;
            }
        }
        Ok(count)
    }

    /// Sends whoever is here away: the service ends.
    pub(super) fn leave(&mut self, now: Instant) {
        if matches!(self.state, State::Here(_)) {
            self.part(now, Some("the service ends".to_owned()));
        }
    }

    /// Lets the front end go. Its memory is let go once nothing touches it.
    fn part(&mut self, now: Instant, why: Over) {
        self.state = match std::mem::replace(&mut self.state, State::Absent) {
            // With the session its descriptors are closed.
            State::Here(session) => {
                let Session { connection, lanes, .. } = *session;
                lanes.values().for_each(Running::stop);
                State::Leaving(Leaving { connection, lanes, patience: Patience::new(now) })
            }
            other => {
                self.state = other;
                return;
            }
        };
        if let Some(more) = self.troubles.checked_sub(TROUBLES_MAX).filter(|more| *more > 0) {
            self.stand.tell(News::Trouble(format!("{more} more of the same front end")));
        }
        self.troubles = 0;
        self.stand.tell(News::Left(why));
    }

    fn farewell(&mut self, now: Instant) -> usize {
        let State::Leaving(leaving) = &mut self.state else { return 0 };
        leaving.lanes.retain(|_, lane| lane.post.ended().is_none());
        if !leaving.lanes.is_empty() {
            let text = format!(
                "a medium has not answered for {FAREWELL}: until it does the front end's memory is \
                 kept, and nobody else is let in"
            );
            leaving.patience.tell(now, &mut self.stand, text);
            return 0;
        }
        self.state = State::Absent;
        1
    }

    /// Tells of something that the front end has done wrong, unless it does so all the time.
    fn trouble(&mut self, text: String) {
        self.troubles += 1;
        if self.troubles <= TROUBLES_MAX {
            self.stand.tell(News::Trouble(text));
        }
    }

    fn serve(
        &mut self,
        now: Instant,
        session: &mut Session,
        request: Request<File>,
    ) -> Result<(), Over> {
        match request {
            Request::Memory { call, change } => {
                session.lanes.values().for_each(Running::stop);
                let (what, patience) = (Wish::Memory { call, change }, Patience::new(now));
                session.pending = Some(Pending { what, patience });
            }
            Request::Stop { call, queue } => {
                if let Some(lane) = session.lanes.get(&queue) {
                    lane.stop();
                }
                let (what, patience) = (Wish::Stop { call, queue }, Patience::new(now));
                session.pending = Some(Pending { what, patience });
            }
            Request::Start { call, queue, start } => {
                let started = self.stand.start(session, queue, start);
                let started = started.map_err(|why| format!("queue {queue}: {why}"));
                self.answer(session, call, started)?;
            }
            Request::SetCall { call, queue, file } => {
                let set = session.set_call(queue, file);
                let set = set.map_err(|why| format!("queue {queue}: {why}"));
                self.answer(session, call, set)?;
            }
            Request::SetBackChannel { call, file } => {
                let back = file.try_clone().and_then(Connection::given);
                let back = back.map_err(|error| format!("the socket for messages: {error}"));
                let set = back.map(|back| session.back = Some(back));
                self.answer(session, call, set)?;
            }
            Request::MakeInflight { call, queues, size } => match make_inflight(queues, size) {
                Ok((area, file)) => session.server.inflight(call, area, Arc::new(file)),
                Err(why) => self.answer(session, call, Err(why))?,
            },
            Request::SetInflight { call, area, file } => {
                let set = self.stand.adopt_inflight(area, &file);
                let set = set.map(|inflight| session.inflight = Some(inflight));
                self.answer(session, call, set)?;
            }
        }
        Ok(())
    }

    fn answer(
        &mut self,
        session: &mut Session,
        call: Call,
        result: Result<(), String>,
    ) -> Result<(), Over> {
        let Err(why) = result else {
            session.server.done(call);
            return Ok(());
        };
        match session.server.refuse(call) {
            Answer::Told => self.trouble(why),
            Answer::Untold => return Err(Some(why)),
        }
        Ok(())
    }

    /// Looks whether lanes have ended, and goes on with what waits for that.
    fn look_after_lanes(&mut self, now: Instant, session: &mut Session) -> Result<usize, Over> {
        let ended = session.lanes.iter().find_map(|(queue, lane)| {
            let why = lane.post.ended()?.why?;
            Some(format!("queue {queue}: {why}"))
        });
        if let Some(why) = ended {
            return Err(Some(why));
        }
        let Some(pending) = &mut session.pending else { return Ok(0) };
        let is_awaited = |queue: u16| match pending.what {
            Wish::Stop { queue: stopped, .. } => queue == stopped,
            Wish::Memory { .. } => true,
        };
        let has_ended = |lane: &Running| lane.post.ended().is_some();
        if session.lanes.iter().any(|(queue, lane)| is_awaited(*queue) && !has_ended(lane)) {
            let text = format!(
                "a medium has not answered for {FAREWELL}: until it does the front end waits for \
                 its queues to stop"
            );
            pending.patience.tell(now, &mut self.stand, text);
            return Ok(0);
        }
        match session.pending.take().map(|pending| pending.what) {
            Some(Wish::Stop { call, queue }) => {
                let lane = session.lanes.remove(&queue);
                let ended = lane.and_then(|lane| lane.post.ended());
                session.server.stopped(call, ended.map_or(0, |ended| ended.next));
            }
            Some(Wish::Memory { call, change }) => {
                let changed = self.stand.change_memory(session, change);
                // The front end believes that the queues run; if they cannot, it has to begin anew.
                self.stand.start_again(session).map_err(Some)?;
                self.answer(session, call, changed)?;
            }
            None => {}
        }
        Ok(1)
    }
}

impl Session {
    /// Takes bytes from the socket. False if there are none now.
    fn receive(&mut self, now: Instant) -> Result<bool, Over> {
        let mut buffer = [0; BUFFER_BYTES];
        let wanted = self.server.wanted().min(buffer.len());
        if wanted == 0 {
            return Ok(false);
        }
        let mut files = Vec::new();
        let received = self.connection.receive_files(&mut buffer[..wanted], &mut files, FILES_MAX);
        match received.map_err(|error| Some(error.to_string()))? {
            Received::Nothing => Ok(false),
            Received::End => Err(None),
            Received::Bytes(count) => {
                let files = files.into_iter().map(Arc::new);
                self.server.receive(&buffer[..count], files).map_err(said)?;
                let is_amid = self.server.is_amid();
                let by = self.whole_by.unwrap_or(now.after(PATIENCE));
                self.whole_by = is_amid.then_some(by);
                Ok(true)
            }
        }
    }

    fn send(&mut self) -> Result<usize, Over> {
        let mut count = 0;
        while let Some((bytes, file)) = self.server.outgoing() {
            let files: Vec<BorrowedFd<'_>> = file.iter().map(|file| file.as_fd()).collect();
            let sent = self.connection.send_files(bytes, &files);
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

    fn set_call(&mut self, queue: u16, file: Option<File>) -> Result<(), String> {
        let call = file.as_ref().map(|file| line(file)).transpose()?;
        match file {
            Some(file) => self.calls.insert(queue, file),
            None => self.calls.remove(&queue),
        };
        if let Some(lane) = self.lanes.get(&queue) {
            lane.post.order(|orders| orders.call = Some(call));
            lane.thread.ring();
        }
        Ok(())
    }
}

impl Running {
    fn stop(&self) {
        self.post.order(|orders| orders.ends = true);
        self.thread.ring();
    }
}

impl Patience {
    fn new(now: Instant) -> Self {
        Self { until: now.after(FAREWELL), is_late: false }
    }

    /// Tells once, when it is over.
    fn tell(&mut self, now: Instant, stand: &mut Stand, text: String) {
        if !self.is_late && now >= self.until {
            self.is_late = true;
            stand.tell(News::Trouble(text));
        }
    }
}

pub(super) fn line(file: &OwnedFd) -> Result<Line, String> {
    let line = file.try_clone().and_then(Line::new);
    line.map_err(|error| error.to_string())
}

fn said(violation: Violation) -> Over {
    Some(violation.to_string())
}
