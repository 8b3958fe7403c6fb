//! A light thread that is moved to and fro while an SSD works for it: under full load, with what is
//! in flight going along or awaited first, and asleep between two moves.

mod migrating_load;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::served::ServeProcess;
use migrating_load::{BUFFER_BYTES, DEPTH, LoadReport, LoadTotals, MigratingLoad, MigrationMode};
use tenmil::{Access, Device, IoError, JoinHandle, Runtime};
use tenmil_base::{IoChannel, Segment, Span};
use tenmil_bench::perf::perf_options::FastPathSwitches;
use tenmil_devices::EmuSpec;
use tenmil_devices::emu::{EmuPlan, EmulatedSsds};
use tenmil_dma::RegionTable;
use tenmil_linux::socket::{SocketEngine, SocketOptions, SocketStreamFactory};
use tenmil_linux::{Clock, CpuList, NamedThread, Sleeper, event_loop};
use tenmil_reactor::{
    Event, Message, PollerBuilder, PollerId, PollerWake, Reactor, ReactorId, ReactorOptions,
    Registry, ThreadBuilder, TimeSource, UnstartedReactors,
};

/// How often the thread is moved.
const MOVES: u64 = 100;

/// Longer than anything here takes on the busiest machine, one move with its load included.
const TIME_LIMIT: Duration = Duration::from_secs(20);

/// An answer that takes longer was slept over: nothing but its own deadline would have brought it.
const FORGOTTEN: Span = Span::from_secs(10);

const DRAIN_MAX: Span = Span::from_secs(10);

#[test]
fn thread_with_128_ios_in_flight_migrates_a_hundred_times() {
    migrate_load("emu:ram?size=1m", MigrationMode::Carry);
}

#[test]
fn thread_without_ios_in_flight_migrates_a_hundred_times() {
    migrate_load("emu:ram?size=1m", MigrationMode::Drain);
}

#[test]
fn thread_sleeping_on_a_slow_ssd_is_woken_after_migration() {
    migrate_load("emu:model:p4600?size=1m", MigrationMode::Carry);
}

/// Moves a thread that loads the SSD to and fro.
fn migrate_load(uri: &str, travel: MigrationMode) {
    let clock = Clock::start();
    let specs = [uri.parse::<EmuSpec>().unwrap()];
    let techniques = &FastPathSwitches::default();
    let depth = u32::try_from(DEPTH).unwrap();
    let plan = EmuPlan {
        specs: &specs,
        queue_pairs: 1,
        depth,
        buffer_bytes: u64::from(depth * BUFFER_BYTES),
        techniques,
        device_cores: &[None],
        yields: true,
        interrupts: true,
        fills: false,
        seed: 5,
    };
    let mut emulated = EmulatedSsds::start(&plan, &clock).unwrap();
    let queue = emulated.create_queue_pair(0, depth, techniques, &clock).unwrap();
    let regions = emulated.regions().clone();
    let buffers = (0..DEPTH).map(|_| emulated.allocate(0, BUFFER_BYTES).unwrap()).collect();
    let maintain = || emulated.poll_controllers(clock.now()).unwrap();
    let tally = migrate_repeatedly(&clock, travel, queue, (regions, buffers), maintain);
    println!("{uri}, {travel:?}: {tally:?}");
    if uri.contains("model") {
        assert!(tally.sleeps.iter().all(|sleeps| *sleeps > 5), "{:?} is no test", tally.sleeps);
    }
    emulated.shut_down(&clock);
}

#[test]
fn thread_with_128_file_ios_in_flight_migrates_a_hundred_times() {
    let directory = tempfile::tempdir().unwrap();
    for (engine, travel) in [
        ("auto", MigrationMode::Carry),
        ("auto", MigrationMode::Drain),
        ("threads", MigrationMode::Carry),
    ] {
        let clock = Clock::start();
        let regions = RegionTable::new(64);
        let path = directory.path().join(format!("{engine}-{travel:?}"));
        let uri = format!("file:{}?size=1m&block=4k&engine={engine}", path.display());
        let opener = tenmil_block::Opener {
            regions: &regions,
            clock,
            seed: 5,
            kinds: tenmil_drivers::KINDS,
        };
        let opened = opener.open(&uri.parse().unwrap()).unwrap();
        let memory = regions.allocate_region(DEPTH * BUFFER_BYTES as usize).unwrap();
        let buffer = |index| memory.segment().slice(index * BUFFER_BYTES, BUFFER_BYTES).unwrap();
        let buffers = (0..u32::try_from(DEPTH).unwrap()).map(buffer).collect();
        let queue = opened.medium.channel().unwrap();
        let tally = migrate_repeatedly(&clock, travel, queue, (regions.clone(), buffers), || ());
        println!("{uri}, {travel:?}: {tally:?}");
    }
}

/// Moves a thread that loads `queue` to and fro, and looks at everything that was counted.
fn migrate_repeatedly(
    clock: &Clock,
    travel: MigrationMode,
    queue: Box<dyn IoChannel>,
    (regions, buffers): (RegionTable, Vec<Segment>),
    mut maintain: impl FnMut(),
) -> LoadTotals {
    let (tell, reported) = channel();
    let woken_by = PollerWake::from_source(queue.wake_source()).unwrap();
    let load = MigratingLoad::new(queue, regions, buffers, travel, tell.clone());
    let load = PollerBuilder::polled_each_iteration("load", woken_by, load)
        .on_panic(move |_, panicked| drop(tell.send(LoadReport::Panicked(panicked.to_string()))));

    let pair = TwoReactors::start_two_reactors(clock);
    let directory = &pair.directory;
    let homes: Vec<ReactorId> = directory.reactors().collect();
    let thread = directory
        .spawn(ThreadBuilder::new("migrating").on_reactor(homes[0]).add_poller(load))
        .unwrap();
    let next = || match reported.recv_timeout(TIME_LIMIT) {
        Ok(LoadReport::Panicked(text)) => panic!("{text}"),
        Ok(reported) => reported,
        Err(error) => panic!("{error} after {:?}", directory.events_since(0).events.last()),
    };
    for index in 1..=MOVES {
        assert!(matches!(next(), LoadReport::Loaded));
        maintain();
        directory.migrate_thread(thread.id(), homes[usize::try_from(index % 2).unwrap()]).unwrap();
    }
    assert!(matches!(next(), LoadReport::Loaded));
    let sample = directory.sample_statistics(clock.now());
    let stop = Message::Data { poller: PollerId::of_builder_index(0), words: [0, 0] };
    thread.send(stop).unwrap();
    let LoadReport::Drained(tally) = next() else { panic!("it never drained") };

    assert_eq!(sample.threads[0].migrations, MOVES);
    assert_eq!(sample.threads[0].home, homes[usize::try_from(MOVES % 2).unwrap()]);
    assert_eq!(sample.reactors.iter().map(|reactor| reactor.migrations).sum::<u64>(), MOVES);
    assert_eq!(reported_migrations(directory), MOVES);
    let loads = vec![DEPTH; usize::try_from(MOVES).unwrap()];
    assert_eq!(tally.loads_left, loads, "in flight when it was told to leave");
    let carried = if travel == MigrationMode::Carry { MOVES * DEPTH as u64 } else { 0 };
    assert_eq!(tally.carried, carried);
    assert_eq!(tally.submitted, tally.completed);
    assert!(tally.verified > MOVES * DEPTH as u64 / 2, "{} reads are no test", tally.verified);
    assert!(tally.latest < FORGOTTEN, "an answer took {}", tally.latest);
    tally
}

/// What tasks and the test tell each other.
#[derive(Default)]
struct TaskProgress {
    in_flight: AtomicUsize,
    verified: AtomicUsize,
    stops: AtomicBool,
}

/// Writes and reads a block in turn until it is stopped.
async fn task(device: Device, traffic: Arc<TaskProgress>, lba: u64) -> Result<(), IoError> {
    let len_bytes = device.limits().block_size;
    let mut buffer = device.buffer(len_bytes).unwrap();
    for version in 1_u64.. {
        let word = (version << 16 | lba).to_le_bytes();
        let content = word.repeat(len_bytes as usize / word.len());
        buffer.store(0, &content);
        traffic.in_flight.fetch_add(1, Ordering::SeqCst);
        let write = device.write(lba, buffer).await;
        traffic.in_flight.fetch_sub(1, Ordering::SeqCst);
        buffer = write?;
        buffer.store(0, &vec![0; len_bytes as usize]);
        traffic.in_flight.fetch_add(1, Ordering::SeqCst);
        let read = device.read(lba, buffer).await;
        traffic.in_flight.fetch_sub(1, Ordering::SeqCst);
        buffer = read?;
        assert!(buffer.to_vec() == content, "block {lba} reads as something else");
        traffic.verified.fetch_add(1, Ordering::SeqCst);
        if traffic.stops.load(Ordering::SeqCst) {
            break;
        }
    }
    Ok(())
}

#[test]
fn thread_with_128_async_ios_in_flight_migrates_a_hundred_times() {
    for name in ["emu:ram?size=1m", "model:p4600?size=1m"] {
        migrate_async_load(name);
    }
}

const TENMIL: &str = env!("CARGO_BIN_EXE_tenmil");

/// A process that serves 1 MiB over NVMe/TCP, and what others call that.
fn serve_tcp(more: &str) -> (ServeProcess, String) {
    let listen = "--listen tcp://127.0.0.1:0";
    let served = ServeProcess::start_shell_line(&format!("{TENMIL} serve ram:1m {listen} {more}"));
    let address = served.ready.trim().strip_prefix("ready ").unwrap().to_owned();
    (served, format!("{address}/nqn.2026-01.org.tenmil:disk?ns=1&depth=128"))
}

#[test]
fn thread_with_128_async_remote_ios_in_flight_migrates_a_hundred_times() {
    let (_served, name) = serve_tcp("");
    migrate_async_load(&name);
}

/// The cores of a target with two reactors, as an argument; none where there is one core.
fn two_cores_argument() -> Option<String> {
    let cores: Vec<u32> = CpuList::allowed_cpus().iter().take(2).collect();
    match cores[..] {
        [one, other] => Some(format!("--cores {one},{other}")),
        _ => {
            println!("skipped: there is one core, and two reactors take two");
            None
        }
    }
}

/// The threads of a target's connections, and where each lives.
fn connection_threads(served: &ServeProcess) -> Vec<(String, u64)> {
    let said: serde_json::Value =
        serde_json::from_str(&served.stdout_of_rpc_command("get threads --json")).unwrap();
    let threads = said.as_array().unwrap().iter();
    let of = |thread: &serde_json::Value| {
        let name = thread["name"].as_str()?;
        Some((name.to_owned(), thread["reactor"].as_u64()?)).filter(|_| name.starts_with("tcp-"))
    };
    threads.filter_map(of).collect()
}

#[test]
fn target_connections_with_128_ios_in_flight_migrate() {
    let Some(cores) = two_cores_argument() else { return };
    let (served, name) = serve_tcp(&cores);
    let crowd = AsyncTaskLoad::new(&name);
    let mut migrations = 0;
    for _ in 0..4 {
        for (thread, reactor) in connection_threads(&served) {
            let other = 1 - reactor;
            crowd.wait_until_all_tasks_progress();
            // On a machine that is busy enough a move is given up, and may be tried again.
            let is_there = || {
                served.stdout_of_rpc_command(&format!("set thread name={thread} reactor={other}"));
                crowd.wait_until_all_tasks_progress();
                connection_threads(&served).contains(&(thread.clone(), other))
            };
            crowd.wait_until(&is_there, "its connection comes home");
            migrations += 1;
        }
    }
    assert!(migrations >= 8, "{migrations} moves are no test: there are an admin and an I/O queue");
    crowd.stop_and_join_tasks();
}

#[test]
fn connection_bound_to_its_ring_is_not_migrated_and_continues() {
    let Some(cores) = two_cores_argument() else { return };
    let options = SocketOptions { engine: SocketEngine::IoUring, ..SocketOptions::default() };
    if let Some(why) = SocketStreamFactory::new(RegionTable::new(64), options).io_uring_error() {
        println!("skipped: {why}");
        return;
    }
    let (served, name) = serve_tcp(&format!("{cores} --socket engine=io_uring"));
    let crowd = AsyncTaskLoad::new(&name);
    crowd.wait_until_all_tasks_progress();
    for (thread, reactor) in connection_threads(&served) {
        let to = format!("reactor={}", 1 - reactor);
        let output = served.command(&["set", "thread", &format!("name={thread}"), &to]).output();
        let output = output.unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{said}");
        let expected = "poller 'connection' cannot leave its reactor: its socket belongs to";
        assert!(said.contains(expected), "{said}");
        crowd.wait_until_all_tasks_progress();
    }
    crowd.stop_and_join_tasks();
}

/// Moves a thread with a device and the tasks that use it to and fro.
fn migrate_async_load(name: &str) {
    let crowd = AsyncTaskLoad::new(name);
    let directory = crowd.rt.registry();
    let homes: Vec<ReactorId> = directory.reactors().collect();
    let [one, other] = homes[..] else {
        println!("skipped: there is one core, and two reactors take two");
        return crowd.stop_and_join_tasks();
    };
    let thread = crowd.device.thread();
    for index in 1..=MOVES {
        crowd.wait_until_all_tasks_progress();
        // One may be between two I/Os: the one that is being polled.
        let in_flight = crowd.traffic.in_flight.load(Ordering::SeqCst);
        assert!(in_flight + 1 >= DEPTH, "{name}: {in_flight} in flight are no test");
        let home = if index % 2 == 0 { one } else { other };
        directory.migrate_thread(thread.id(), home).unwrap();
        crowd.wait_until(&|| thread.reactor() == home, "it comes home");
    }
    let directory = Arc::clone(directory);
    crowd.stop_and_join_tasks();
    assert_eq!(reported_migrations(&directory), MOVES);
}

/// 128 tasks that use a device, on a light thread of one of two reactors.
struct AsyncTaskLoad {
    name: String,
    clock: Clock,
    give_up: tenmil_base::Instant,
    device: Device,
    traffic: Arc<TaskProgress>,
    joins: Vec<JoinHandle<Result<(), IoError>>>,
    rt: Runtime,
}

impl AsyncTaskLoad {
    fn new(name: &str) -> Self {
        let clock = Clock::start();
        let cores: Vec<u32> = CpuList::allowed_cpus().iter().collect();
        let places = [cores[0], cores[cores.len() - 1]];
        // However busy the machine is, a move is not given up.
        let builder = Runtime::builder().cores(places).stop_timeout(Duration::from_secs(10));
        let rt = builder.start().unwrap();
        let device = rt.block_on(rt.open(name, Access::ReadWrite)).unwrap();
        let traffic = Arc::new(TaskProgress::default());
        let begin = |lba| device.spawn(task(device.clone(), Arc::clone(&traffic), lba)).unwrap();
        let joins = (0..DEPTH as u64).map(begin).collect();
        let give_up = clock.now().after(Span::from_secs(100));
        Self { name: name.to_owned(), clock, give_up, device, traffic, joins, rt }
    }

    fn wait_until(&self, is_so: &dyn Fn() -> bool, what: &str) {
        while !is_so() {
            assert!(self.clock.now() < self.give_up, "{}: {what} never", self.name);
            tenmil_linux::named_thread::yield_cpu();
        }
    }

    /// Waits until as many I/Os as there are tasks have been verified.
    fn wait_until_all_tasks_progress(&self) {
        let before = self.traffic.verified.load(Ordering::SeqCst);
        let verified = || self.traffic.verified.load(Ordering::SeqCst);
        self.wait_until(&|| verified() > before + DEPTH, "all go round");
    }

    fn stop_and_join_tasks(self) {
        self.traffic.stops.store(true, Ordering::SeqCst);
        for join in self.joins {
            self.rt.block_on(join).unwrap().unwrap();
        }
        self.rt.block_on(self.device.close());
    }
}

/// Two reactors that turn: on two cores, or both on the one that there is. Stopped when dropped.
struct TwoReactors {
    directory: Arc<Registry>,
    _threads: Vec<NamedThread<()>>,
}

impl TwoReactors {
    fn start_two_reactors(clock: &Clock) -> Self {
        let cores: Vec<u32> = CpuList::allowed_cpus().iter().collect();
        let places = [cores[0], cores[cores.len() - 1]];
        // However busy the machine is, a move is not given up.
        let options = ReactorOptions { drain_max: DRAIN_MAX, ..ReactorOptions::default() };
        let stopwatch = TimeSource::Clock(*clock);
        let assembly = UnstartedReactors::new(&places, &options, &stopwatch, clock.now()).unwrap();
        let start = |((mut reactor, mut sleeper), core): ((Reactor, Sleeper), u32)| {
            let clock = *clock;
            let body = move |_: &tenmil_linux::StopFlag| {
                event_loop::run_event_loop(&mut reactor, &clock, &mut sleeper)
            };
            NamedThread::spawn("reactor", Some(core), body).unwrap()
        };
        let threads = assembly.reactors.into_iter().zip(places).map(start).collect();
        Self { directory: assembly.registry, _threads: threads }
    }
}

impl Drop for TwoReactors {
    fn drop(&mut self) {
        for reactor in self.directory.reactors() {
            // Refused only if it has ended by itself.
            let _ = self.directory.stop_reactor(reactor);
        }
    }
}

/// How many moves the events tell of, each from where the one before has led.
fn reported_migrations(directory: &Registry) -> u64 {
    let (mut count, mut at) = (0, None);
    for noted in directory.events_since(0).events {
        match noted.event {
            Event::ThreadMigrated { from, to, .. } => {
                assert!(from != to && at.is_none_or(|at| at == from), "{from} to {to}, not {at:?}");
                at = Some(to);
                count += 1;
            }
            Event::MigrationTimeout { poller, .. } => panic!("{poller} was not let go"),
            _ => {}
        }
    }
    count
}
