//! Sampling thread: queries the watched process periodically, so that the screen never blocks.

use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::time::Duration;

use serde_json::Value;
use tenmil_base::{Error, Span};
use tenmil_linux::process_stats::command_line;
use tenmil_linux::running_processes::ProcessSearch;
use tenmil_linux::{Clock, NamedThread, StopFlag};
use tenmil_rpc::{ControlEndpoint, ErrorCode, RpcClient, RpcError};

use super::app_state::{EventLine, RunningProcess, SamplerUpdate};
use super::key_bindings::SamplerRequest;
use super::process_queries::{self, TIME_LIMIT};
use super::process_sample::{ProcessSample, command_error};
use crate::io_rates::Grouping;

/// Handle of the sampling thread. Dropping it stops the thread, which takes as long as one query.
#[derive(Debug)]
pub(crate) struct SamplerHandle {
    requests: SyncSender<SamplerRequest>,
    // Dropped before the thread, which may be blocked on the full channel.
    new_events: Receiver<SamplerUpdate>,
    _thread: NamedThread<()>,
}

/// Selected process.
#[derive(Clone, Debug)]
pub(crate) enum WatchedProcess {
    /// Process of this identifier.
    Pid(u32),
    /// Process that listens there.
    At(ControlEndpoint),
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
    /// Starts a thread that watches the selected process, or the only running one, and samples it
    /// every `interval`.
    pub(crate) fn start(
        search: ProcessSearch,
        selected: Option<WatchedProcess>,
        interval: Span,
    ) -> Result<Self, Error> {
        let (requests, request_receiver) = sync_channel(16);
        let (updates, new_events) = sync_channel(256);
        let clock = Clock::on_kernel_clock();
        let watcher = Sampler {
            search,
            selected,
            must_list: false,
            interval,
            request_receiver,
            updates,
            clock,
            io: None,
        };
        let thread = NamedThread::spawn("top", None, move |stop| watcher.run_sampling(stop))
            .map_err(|error| Error::environment(format!("start a thread: {error}")))?;
        Ok(Self { requests, new_events, _thread: thread })
    }

    /// Sends a command. If the channel is full, the command is dropped.
    pub(crate) fn send_request(&self, request: SamplerRequest) {
        let _ = self.requests.try_send(request);
    }

    /// The next update, if there is one.
    pub(crate) fn next_update(&self) -> Result<Option<SamplerUpdate>, Error> {
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
    search: ProcessSearch,
    /// Process to watch; without one, the only running process.
    selected: Option<WatchedProcess>,
    /// The user requested the list, so it is shown even if only one process runs.
    must_list: bool,
    interval: Span,
    request_receiver: Receiver<SamplerRequest>,
    updates: SyncSender<SamplerUpdate>,
    clock: Clock,
    /// What the rows of the I/O statistics are about, while they are sampled.
    io: Option<Grouping>,
}

/// End of watching a process: it has exited, another command has arrived, or the screen is closed.
struct WatchEnd;

impl Sampler {
    fn run_sampling(mut self, stop: &StopFlag) {
        while !stop.is_stopped() {
            match self.find_process() {
                Ok(Some(mut client)) => drop(self.watch_process(&mut client, stop)),
                Ok(None) => {
                    let request = self.request_receiver.recv_timeout(LIST_INTERVAL);
                    request.into_iter().for_each(|request| self.handle_request(request));
                }
                // The screen is closed.
                Err(WatchEnd) => return,
            }
        }
    }

    fn send_update(&self, new_events: SamplerUpdate) -> Result<(), WatchEnd> {
        self.updates.send(new_events).map_err(|_| WatchEnd)
    }

    fn handle_request(&mut self, request: SamplerRequest) {
        (self.selected, self.must_list) = match request {
            SamplerRequest::Attach(pid) => (Some(WatchedProcess::Pid(pid)), false),
            SamplerRequest::List => (None, true),
            SamplerRequest::SampleIo(grouping) => {
                self.io = grouping;
                return;
            }
        };
    }

    /// Lists the running processes, and connects to the selected one.
    fn find_process(&self) -> Result<Option<RpcClient>, WatchEnd> {
        if let Some(WatchedProcess::At(endpoint)) = &self.selected {
            return self.attach_or_report(endpoint);
        }
        let found = match &self.selected {
            Some(WatchedProcess::Pid(pid)) => {
                self.search.find_pid(*pid).map(|found| found.into_iter().collect())
            }
            _ => self.search.processes(),
        };
        let running = match found {
            Ok(running) => running,
            Err(error) => {
                let path = self.search.own_directory().path().display();
                let why = format!("look into {path}: {error}");
                return self.send_update(SamplerUpdate::Silent(why)).map(|()| None);
            }
        };
        match running.as_slice() {
            [process] if !self.must_list => {
                self.attach_or_report(&ControlEndpoint::Socket(process.socket.clone()))
            }
            processes => {
                let listed = processes.iter().map(|process| running_process(process.pid));
                self.send_update(SamplerUpdate::Running(listed.collect())).map(|()| None)
            }
        }
    }

    /// Connects to a process, or reports why that failed.
    fn attach_or_report(&self, at: &ControlEndpoint) -> Result<Option<RpcClient>, WatchEnd> {
        match attach_to_process(at) {
            Ok((client, new_events)) => self.send_update(new_events).map(|()| Some(client)),
            Err(refused) => self.send_update(SamplerUpdate::Silent(refused.text)).map(|()| None),
        }
    }

    /// Samples the process periodically and forwards its events.
    fn watch_process(&mut self, client: &mut RpcClient, stop: &StopFlag) -> Result<(), WatchEnd> {
        let mut interval = self.interval.min(FIRST_INTERVAL);
        while !stop.is_stopped() {
            let next = self.clock.now().after(interval);
            match self.take_sample(client) {
                Ok(new_events) => self.send_update(new_events)?,
                Err(refusal) => self.handle_error(refusal)?,
            }
            self.sample_io(client)?;
            let mut events_left = EVENTS_MAX;
            while self.clock.now() < next && !stop.is_stopped() {
                if let Ok(request) = self.request_receiver.try_recv() {
                    self.handle_request(request);
                    if !matches!(request, SamplerRequest::SampleIo(_)) {
                        return Err(WatchEnd);
                    }
                    self.sample_io(client)?;
                }
                let wait = POLL_INTERVAL.min(next.since(self.clock.now()));
                match client.next_event(wait) {
                    Ok(Some(event)) if events_left > 0 => {
                        events_left -= 1;
                        self.send_update(SamplerUpdate::Happened(event_line(&event)))?;
                    }
                    Ok(_) => {}
                    Err(refusal) => self.handle_error(refusal)?,
                }
            }
            interval = self.interval;
        }
        Ok(())
    }

    /// Samples the I/O statistics, if they are shown. A process that serves nothing has no rows.
    fn sample_io(&self, client: &mut RpcClient) -> Result<(), WatchEnd> {
        let Some(grouping) = self.io else { return Ok(()) };
        match process_queries::query_io(client, &self.clock, grouping) {
            Ok(sample) => self.send_update(SamplerUpdate::LookedAtIo(grouping, sample)),
            Err(refusal) => self.handle_error(refusal),
        }
    }

    fn take_sample(&self, client: &mut RpcClient) -> Result<SamplerUpdate, RpcError> {
        let sample = match process_queries::call_method(client, "snapshot_stats") {
            // A process without reactors may start some later.
            Err(refusal) if refusal.code == ErrorCode::NotFound => {
                ProcessSample { monotonic_ns: self.clock.now().ns, ..ProcessSample::default() }
            }
            result => match process_queries::parse_sample(result?) {
                Ok(sample) => sample,
                Err(refused) => return Ok(SamplerUpdate::Silent(refused.text)),
            },
        };
        Ok(SamplerUpdate::Looked {
            sample,
            policy: process_queries::query_scheduler_policy(client)?,
        })
    }

    /// Reports a failed query. Returns an error if the process has ended.
    fn handle_error(&self, refusal: RpcError) -> Result<(), WatchEnd> {
        match refusal.code {
            ErrorCode::ConnectionClosed | ErrorCode::NotJson | ErrorCode::NoProcess => {
                self.send_update(SamplerUpdate::Exited(refusal.message))?;
                Err(WatchEnd)
            }
            _ => self.send_update(SamplerUpdate::Silent(refusal.message)),
        }
    }
}

fn attach_to_process(at: &ControlEndpoint) -> Result<(RpcClient, SamplerUpdate), Error> {
    let mut client = RpcClient::connect_to(at, TIME_LIMIT).map_err(command_error)?;
    let process = process_queries::query_process(&mut client)?;
    // A process without events is watched all the same.
    let _ = process_queries::call_method(&mut client, "events");
    Ok((client, SamplerUpdate::Attached(process)))
}

fn running_process(pid: u32) -> RunningProcess {
    let command_line = command_line(pid).unwrap_or_default().join(" ");
    RunningProcess { pid, command_line }
}

fn event_line(event: &Value) -> EventLine {
    let text = |name: &str| event[name].as_str().unwrap_or("-").to_owned();
    EventLine { kind: text("kind"), text: text("text") }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Span;
    use tenmil_linux::Clock;
    use tenmil_linux::running_processes::ProcessSearch;
    use tenmil_linux::runtime_directory::RuntimeDirectory;
    use tenmil_rpc::{
        Event, EventKind, ProcessParts, ProgramInfo, RpcServer, TABLE, event_channel,
    };

    use super::{SamplerHandle, WatchedProcess};
    use crate::top::app_state::SamplerUpdate;
    use crate::top::key_bindings::SamplerRequest;

    struct World {
        _root: tempfile::TempDir,
        directory: RuntimeDirectory,
    }

    impl World {
        fn start_test_sampler() -> Self {
            let root = tempfile::tempdir().unwrap();
            let directory = RuntimeDirectory::at_path(root.path().join("tenmil")).unwrap();
            Self { _root: root, directory }
        }

        fn serve_test_process(&self, pid: u32) -> (RpcServer, tenmil_rpc::EventSender) {
            let (announcer, announced) = event_channel().unwrap();
            let state = ProcessParts::new().with_part(ProgramInfo { version: "9.9.9", log: None });
            let server = RpcServer::start(&self.directory, pid, &TABLE, state, announced).unwrap();
            (server, announcer)
        }

        fn test_sampler(&self, pid: Option<u32>) -> SamplerHandle {
            let search = ProcessSearch::in_directory(self.directory.clone());
            SamplerHandle::start(search, pid.map(WatchedProcess::Pid), Span::from_ms(20)).unwrap()
        }
    }

    /// Waits for an update that matches, with a time limit.
    fn await_update(
        link: &SamplerHandle,
        what: &str,
        is_it: impl Fn(&SamplerUpdate) -> bool,
    ) -> SamplerUpdate {
        let clock = Clock::on_kernel_clock();
        let end = clock.now().after(Span::from_secs(30));
        while clock.now() < end {
            match link.next_update().unwrap() {
                Some(new_events) if is_it(&new_events) => return new_events,
                Some(_) => {}
                None => tenmil_linux::named_thread::yield_cpu(),
            }
        }
        panic!("no {what}");
    }

    fn await_attach(link: &SamplerHandle) {
        await_update(link, "connection", |new_events| {
            matches!(new_events, SamplerUpdate::Attached(_))
        });
    }

    #[test]
    fn only_process_is_watched_and_may_have_no_reactors() {
        let world = World::start_test_sampler();
        let (_server, announcer) = world.serve_test_process(7);
        let link = world.test_sampler(None);
        await_attach(&link);
        let new_events = await_update(&link, "sample", |new_events| {
            matches!(new_events, SamplerUpdate::Looked { .. })
        });
        let SamplerUpdate::Looked { sample, policy } = new_events else { unreachable!() };
        assert_eq!((sample.reactors.len(), policy), (0, None));
        let kind = EventKind { name: "bell", help: "the bell rang" };
        announcer.emit(Event { kind, text: "ding".into(), about: serde_json::json!({}) });
        let new_events = await_update(&link, "event", |new_events| {
            matches!(new_events, SamplerUpdate::Happened(_))
        });
        let SamplerUpdate::Happened(happened) = new_events else { unreachable!() };
        assert_eq!((happened.kind.as_str(), happened.text.as_str()), ("bell", "ding"));
    }

    #[test]
    fn exited_process_is_reported_and_its_successor_watched() {
        let world = World::start_test_sampler();
        let link = world.test_sampler(None);
        await_update(&link, "list", |new_events| *new_events == SamplerUpdate::Running(Vec::new()));
        let first = world.serve_test_process(7);
        await_attach(&link);
        drop(first);
        await_update(&link, "end", |new_events| matches!(new_events, SamplerUpdate::Exited(_)));
        let _second = world.serve_test_process(8);
        await_attach(&link);
    }

    #[test]
    fn one_of_several_processes_is_selected_and_can_be_changed() {
        let world = World::start_test_sampler();
        let servers = [world.serve_test_process(7), world.serve_test_process(8)];
        let link = world.test_sampler(None);
        let listed = |count: usize| {
            let is_it = |new_events: &SamplerUpdate| matches!(new_events, SamplerUpdate::Running(all) if all.len() == count);
            await_update(&link, "list", is_it);
        };
        listed(2);
        link.send_request(SamplerRequest::Attach(8));
        await_attach(&link);
        link.send_request(SamplerRequest::List);
        listed(2);
        drop(servers);
        listed(0);
        let _one = world.serve_test_process(9);
        listed(1);
    }

    #[test]
    fn process_selected_by_pid_is_awaited() {
        let world = World::start_test_sampler();
        let _other = world.serve_test_process(8);
        let link = world.test_sampler(Some(7));
        await_update(&link, "list", |new_events| *new_events == SamplerUpdate::Running(Vec::new()));
        let _server = world.serve_test_process(7);
        await_attach(&link);
    }
}
