//! A server and its clients release everything. Runs in a process of its own, because it counts
//! resources of the whole process.

use serde_json::Map;
use tenmil_base::Span;
use tenmil_linux::Clock;
use tenmil_linux::process_stats::ProcessStats;
use tenmil_linux::runtime_directory::RuntimeDirectory;
use tenmil_rpc::{ProcessParts, ProgramInfo, RpcClient, RpcServer, TABLE, event_channel};

const TIME_LIMIT: Span = Span::from_secs(20);

fn resource_counts() -> (Option<u64>, Option<u64>) {
    let usage = ProcessStats::read();
    (usage.descriptors, usage.threads)
}

/// The counts, as soon as they equal `expected` or after a time limit: the kernel counts a thread
/// for a moment after it was joined.
fn await_stable_counts(expected: (Option<u64>, Option<u64>)) -> (Option<u64>, Option<u64>) {
    let clock = Clock::on_kernel_clock();
    let end = clock.now().after(TIME_LIMIT);
    while resource_counts() != expected && clock.now() < end {
        tenmil_linux::named_thread::yield_cpu();
    }
    resource_counts()
}

#[test]
fn dropped_server_leaves_no_descriptor_thread_or_socket() {
    let root = tempfile::tempdir().unwrap();
    let directory = RuntimeDirectory::at_path(root.path().join("run")).unwrap();
    let before = resource_counts();
    assert!(before.0.is_some() && before.1.is_some(), "it can be counted");
    for round in 0..20 {
        let (announcer, announced) = event_channel().unwrap();
        let state = ProcessParts::new().with_part(ProgramInfo { version: "1", log: None });
        let server = RpcServer::start(&directory, 7, &TABLE, state, announced).unwrap();
        let mut clients: Vec<RpcClient> = (0..10)
            .map(|_| RpcClient::connect(server.socket_path(), TIME_LIMIT).unwrap())
            .collect();
        for client in &mut clients {
            client.call_method("events", Map::new(), TIME_LIMIT).unwrap();
        }
        let during = resource_counts();
        assert!(during.0 >= before.0.map(|count| count + 20) && during.1 > before.1, "{during:?}");
        // Some clients close before the server ends, some after it.
        clients.truncate(round % 10);
        drop(server);
        drop((clients, announcer));
        assert_eq!(await_stable_counts(before), before, "round {round}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
