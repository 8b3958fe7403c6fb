//! A server and its clients leave nothing behind. In a process of its own: it counts what the whole
//! process has.

use base::Span;
use host::Clock;
use host::process::Usage;
use host::runtime_directory::RuntimeDirectory;
use serde_json::Map;
use tenmil_control::{Client, Process, Server, State, TABLE, announcements};

const PATIENCE: Span = Span::from_secs(20);

fn counts() -> (Option<u64>, Option<u64>) {
    let usage = Usage::read();
    (usage.descriptors, usage.threads)
}

/// The counts, once they are `expected` or some time has passed: the kernel counts a thread for a
/// moment after it was joined.
fn settled(expected: (Option<u64>, Option<u64>)) -> (Option<u64>, Option<u64>) {
    let clock = Clock::kernel();
    let end = clock.now().after(PATIENCE);
    while counts() != expected && clock.now() < end {
        host::thread::give_way();
    }
    counts()
}

#[test]
fn a_server_that_is_dropped_leaves_no_descriptor_thread_or_socket() {
    let root = tempfile::tempdir().unwrap();
    let directory = RuntimeDirectory::at(root.path().join("run")).unwrap();
    let before = counts();
    assert!(before.0.is_some() && before.1.is_some(), "it can be counted");
    for round in 0..20 {
        let (announcer, announced) = announcements().unwrap();
        let state = State::new().with(Process { version: "1", log: None });
        let server = Server::start(&directory, 7, &TABLE, state, announced).unwrap();
        let mut clients: Vec<Client> =
            (0..10).map(|_| Client::connect(server.path(), PATIENCE).unwrap()).collect();
        for client in &mut clients {
            client.call("events", Map::new(), PATIENCE).unwrap();
        }
        let during = counts();
        assert!(during.0 >= before.0.map(|count| count + 20) && during.1 > before.1, "{during:?}");
        // Some go before the server does, and some after it.
        clients.truncate(round % 10);
        drop(server);
        drop((clients, announcer));
        assert_eq!(settled(before), before, "round {round}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
