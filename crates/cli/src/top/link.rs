//! Sampling thread: queries the watched process periodically, so that the screen never blocks.

use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::Duration;

use serde_json::Value;
use tenmil_base::{Error, Span};
use tenmil_linux::process::command_line;
use tenmil_linux::runtime_directory::RuntimeDirectory;
use tenmil_linux::{Clock, StopFlag, Thread};
use tenmil_rpc::{Client, Code, RpcError};

use super::keys::Request;
use super::query::{self, TIME_LIMIT};
use super::sample::{Sample, refused};
use super::state::{EventLine, Running, Update};

/// Handle of the sampling thread. Dropping it stops the thread, which takes as long as one query.
#[derive(Debug)]
pub(crate) struct SamplerHandle {
    wishes: SyncSender<Request>,
    // Dropped before the thread, which may be blocked on the full channel.
    new_events: Receiver<Update>,
    _thread: Thread<()>,
}

/// Interval at which the thread checks for a stop or a command.
const POLL_INTERVAL: Span = Span::from_ms(50);
/// Interval at which running processes are listed.
const LIST_INTERVAL: Duration = Duration::from_millis(300);
/// The second sample follows soon, because rates need two samples.
const FIRST_INTERVAL: Span = Span::from_ms(250);
/// Maximum number of events taken between two samples; the others are dropped.
const EVENTS_MAX: usize = 64;

impl SamplerHandle {
    /// Starts a thread that watches `pid`, or the only running process, and samples it every
    /// `interval`.
    pub(crate) fn start(
        directory: RuntimeDirectory,
        pid: Option<u32>,
        interval: Span,
    ) -> Result<Self, Error> {
        let (wishes, wished) = sync_channel(16);
        let (updates, new_events) = sync_channel(256);
        let clock = Clock::kernel();
        let watcher =
            Sampler { directory, pid, must_list: false, interval, wished, updates, clock };
        let thread = Thread::spawn("top", None, move |stop| watcher.run(stop))
            .map_err(|error| Error::environment(format!("start a thread: {error}")))?;
        Ok(Self { wishes, new_events, _thread: thread })
    }

    /// Sends a command. If the channel is full, the command is dropped.
    pub(crate) fn request(&self, wish: Request) {
        let _ = self.wishes.try_send(wish);
    }

    /// The next update, if there is one.
    pub(crate) fn next_update(&self) -> Result<Option<Update>, Error> {
        match self.new_events.try_recv() {
            Ok(new_events) => Ok(Some(new_events)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => {
                Err(Error::environment("watch: the sampling thread has ended, expected it to run"))
            }
        }
    }
}

/// State of the sampling thread.
struct Sampler {
    directory: RuntimeDirectory,
    /// Process to watch; without one, the only running process.
    pid: Option<u32>,
    /// The user requested the list, so it is shown even if only one process runs.
    must_list: bool,
    interval: Span,
    wished: Receiver<Request>,
    updates: SyncSender<Update>,
    clock: Clock,
}

/// End of watching a process: it has exited, another command has arrived, or the screen is closed.
struct StopReason;

impl Sampler {
    fn run(mut self, stop: &StopFlag) {
        while !stop.is_stopped() {
            match self.find() {
                Ok(Some(mut client)) => drop(self.watch(&mut client, stop)),
                Ok(None) => {
                    let wish = self.wished.recv_timeout(LIST_INTERVAL);
                    wish.into_iter().for_each(|wish| self.handle_request(wish));
                }
                // The screen is closed.
                Err(StopReason) => return,
            }
        }
    }

    fn send_update(&self, new_events: Update) -> Result<(), StopReason> {
        self.updates.send(new_events).map_err(|_| StopReason)
    }

    fn handle_request(&mut self, wish: Request) {
        (self.pid, self.must_list) = match wish {
            Request::Attach(pid) => (Some(pid), false),
            Request::List => (None, true),
        };
    }

    /// Lists the running processes, and connects to the selected one.
    fn find(&self) -> Result<Option<Client>, StopReason> {
        let running = match self.directory.listening() {
            Ok(running) => running,
            Err(error) => {
                let path = self.directory.path().display();
                let why = format!("look into {path}: {error}");
                return self.send_update(Update::Silent(why)).map(|()| None);
            }
        };
        let pid = match (self.pid, running.as_slice()) {
            (Some(pid), running) => running.contains(&pid).then_some(pid),
            (None, [pid]) if !self.must_list => Some(*pid),
            (None, _) => None,
        };
        let Some(pid) = pid else {
            let listed = running.iter().filter(|_| self.pid.is_none()).map(|pid| described(*pid));
            return self.send_update(Update::Running(listed.collect())).map(|()| None);
        };
        match self.attach(pid) {
            Ok((client, new_events)) => self.send_update(new_events).map(|()| Some(client)),
            Err(refused) => self.send_update(Update::Silent(refused.text)).map(|()| None),
        }
    }

    fn attach(&self, pid: u32) -> Result<(Client, Update), Error> {
        let path = self.directory.socket_of(pid);
        let mut client = Client::connect(&path, TIME_LIMIT).map_err(refused)?;
        let process = query::process(&mut client)?;
        // A process without events is watched all the same.
        let _ = query::call(&mut client, "events");
        Ok((client, Update::Attached(process)))
    }

    /// Samples the process periodically and forwards its events.
    fn watch(&mut self, client: &mut Client, stop: &StopFlag) -> Result<(), StopReason> {
        let mut interval = self.interval.min(FIRST_INTERVAL);
        while !stop.is_stopped() {
            let next = self.clock.now().after(interval);
            match self.sample(client) {
                Ok(new_events) => self.send_update(new_events)?,
                Err(refusal) => self.handle_error(refusal)?,
            }
            let mut events_left = EVENTS_MAX;
            while self.clock.now() < next && !stop.is_stopped() {
                if let Ok(wish) = self.wished.try_recv() {
                    self.handle_request(wish);
                    return Err(StopReason);
                }
                let wait = POLL_INTERVAL.min(next.since(self.clock.now()));
                match client.next_event(wait) {
                    Ok(Some(event)) if events_left > 0 => {
                        events_left -= 1;
                        self.send_update(Update::Happened(happened(&event)))?;
                    }
                    Ok(_) => {}
                    Err(refusal) => self.handle_error(refusal)?,
                }
            }
            interval = self.interval;
        }
        Ok(())
    }

    fn sample(&self, client: &mut Client) -> Result<Update, RpcError> {
        let sample = match query::call(client, "snapshot_stats") {
            // A process without reactors may start some later.
            Err(refusal) if refusal.code == Code::NotFound => {
                Sample { monotonic_ns: self.clock.now().ns, ..Sample::default() }
            }
            result => match query::sample(result?) {
                Ok(sample) => sample,
                Err(refused) => return Ok(Update::Silent(refused.text)),
            },
        };
        Ok(Update::Looked { sample, policy: query::policy(client)? })
    }

    /// Reports a failed query. Returns an error if the process has ended.
    fn handle_error(&self, refusal: RpcError) -> Result<(), StopReason> {
        match refusal.code {
            Code::ConnectionClosed | Code::NotJson | Code::NoProcess => {
                self.send_update(Update::Exited(refusal.message))?;
                Err(StopReason)
            }
            _ => self.send_update(Update::Silent(refusal.message)),
        }
    }
}

fn described(pid: u32) -> Running {
    let command_line = command_line(pid).unwrap_or_default().join(" ");
    Running { pid, command_line }
}

fn happened(event: &Value) -> EventLine {
    let text = |name: &str| event[name].as_str().unwrap_or("-").to_owned();
    EventLine { kind: text("kind"), text: text("text") }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Span;
    use tenmil_linux::Clock;
    use tenmil_linux::runtime_directory::RuntimeDirectory;
    use tenmil_rpc::{Event, EventKind, ProgramInfo, Server, ServerState, TABLE, announcements};

    use super::SamplerHandle;
    use crate::top::keys::Request;
    use crate::top::state::Update;

    struct World {
        _root: tempfile::TempDir,
        directory: RuntimeDirectory,
    }

    impl World {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let directory = RuntimeDirectory::at(root.path().join("tenmil")).unwrap();
            Self { _root: root, directory }
        }

        fn serve(&self, pid: u32) -> (Server, tenmil_rpc::EventSender) {
            let (announcer, announced) = announcements().unwrap();
            let state = ServerState::new().with(ProgramInfo { version: "9.9.9", log: None });
            let server = Server::start(&self.directory, pid, &TABLE, state, announced).unwrap();
            (server, announcer)
        }

        fn link(&self, pid: Option<u32>) -> SamplerHandle {
            SamplerHandle::start(self.directory.clone(), pid, Span::from_ms(20)).unwrap()
        }
    }

    /// Waits for an update that matches, with a time limit.
    fn wait_for(link: &SamplerHandle, what: &str, is_it: impl Fn(&Update) -> bool) -> Update {
        let clock = Clock::kernel();
        let end = clock.now().after(Span::from_secs(30));
        while clock.now() < end {
            match link.next_update().unwrap() {
                Some(new_events) if is_it(&new_events) => return new_events,
                Some(_) => {}
                None => tenmil_linux::thread::yield_now(),
            }
        }
        panic!("no {what}");
    }

    fn attached(link: &SamplerHandle) {
        wait_for(link, "connection", |new_events| matches!(new_events, Update::Attached(_)));
    }

    #[test]
    fn the_only_process_is_watched_and_one_without_reactors_has_none() {
        let world = World::new();
        let (_server, announcer) = world.serve(7);
        let link = world.link(None);
        attached(&link);
        let new_events =
            wait_for(&link, "sample", |new_events| matches!(new_events, Update::Looked { .. }));
        let Update::Looked { sample, policy } = new_events else { unreachable!() };
        assert_eq!((sample.reactors.len(), policy), (0, None));
        let kind = EventKind { name: "bell", help: "somebody rang" };
        announcer.emit(Event { kind, text: "ding".into(), about: serde_json::json!({}) });
        let new_events =
            wait_for(&link, "event", |new_events| matches!(new_events, Update::Happened(_)));
        let Update::Happened(happened) = new_events else { unreachable!() };
        assert_eq!((happened.kind.as_str(), happened.text.as_str()), ("bell", "ding"));
    }

    #[test]
    fn one_that_goes_is_said_to_have_gone_and_its_successor_is_watched() {
        let world = World::new();
        let link = world.link(None);
        wait_for(&link, "list", |new_events| *new_events == Update::Running(Vec::new()));
        let first = world.serve(7);
        attached(&link);
        drop(first);
        wait_for(&link, "end", |new_events| matches!(new_events, Update::Exited(_)));
        let _second = world.serve(8);
        attached(&link);
    }

    #[test]
    fn of_several_one_is_chosen_and_others_can_be_listed_again() {
        let world = World::new();
        let servers = [world.serve(7), world.serve(8)];
        let link = world.link(None);
        let listed = |count: usize| {
            let is_it = |new_events: &Update| matches!(new_events, Update::Running(all) if all.len() == count);
            wait_for(&link, "list", is_it);
        };
        listed(2);
        link.request(Request::Attach(8));
        attached(&link);
        link.request(Request::List);
        listed(2);
        drop(servers);
        listed(0);
        let _one = world.serve(9);
        listed(1);
    }

    #[test]
    fn a_process_that_is_named_is_waited_for_by_its_number() {
        let world = World::new();
        let _other = world.serve(8);
        let link = world.link(Some(7));
        wait_for(&link, "list", |new_events| *new_events == Update::Running(Vec::new()));
        let _server = world.serve(7);
        attached(&link);
    }
}
