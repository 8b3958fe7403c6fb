//! Groups by artificial identifiers, and by those of a virtual card in network namespaces.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::Duration;

use tenmil_base::Span;
use tenmil_dma::RegionTable;

use super::super::socket_options::{busy_poll_of, set_busy_poll};
use super::NapiGroups;
use crate::ethtool;
use crate::socket::{SocketOptions, SocketStreamFactory};

const BUSY: Span = Span::from_us(50);

fn test_socket() -> OwnedFd {
    std::net::UdpSocket::bind("127.0.0.1:0").unwrap().into()
}

/// The sockets that poll.
fn polling_sockets(sockets: &[OwnedFd]) -> Vec<bool> {
    sockets.iter().map(|socket| busy_poll_of(socket.as_fd()) == Some(50)).collect()
}

#[test]
fn one_socket_per_queue_polls_and_another_after_it_closes() {
    let sockets: Vec<OwnedFd> = (0..4).map(|_| test_socket()).collect();
    for socket in &sockets {
        if set_busy_poll(socket.as_fd(), BUSY).is_err() {
            println!("skipped: SO_BUSY_POLL takes CAP_NET_ADMIN");
            return;
        }
    }
    let groups = NapiGroups::default();
    let join =
        |queue, at: usize| groups.join_group_of_queue(queue, sockets[at].as_fd(), BUSY).unwrap();
    let (first, second, third, other) = (join(7, 0), join(7, 1), join(7, 2), join(9, 3));
    assert_eq!(groups.group_sizes(), [(7, 3), (9, 1)]);
    assert_eq!(polling_sockets(&sockets), [false, false, true, true]);
    drop(second);
    assert_eq!(polling_sockets(&sockets), [false, false, true, true], "another polls already");
    drop(third);
    assert_eq!(polling_sockets(&sockets[..1]), [true]);
    drop((first, other));
    assert_eq!(groups.group_sizes(), []);
}

#[test]
fn socket_without_queue_is_in_no_group() {
    let (groups, socket) = (NapiGroups::default(), test_socket());
    assert!(groups.join_group(socket.as_fd(), BUSY).is_none());
    assert_eq!(groups.group_sizes(), []);
}

/// Role of a process in the next test.
const PART: &str = "TENMIL_TEST_QUEUE_PART";
const NAME: &str =
    "socket::napi_groups::tests::sockets_of_one_nic_queue_form_a_group_with_one_poller";
const ADDRESS: &str = "10.98.0.2:5000";
const CONNECTIONS: usize = 3;

fn run_ip_command(line: &str) -> bool {
    Command::new("ip").args(line.split(' ')).stderr(Stdio::null()).status().unwrap().success()
}

/// This test in a network namespace of its own, in another role.
fn role_command(part: &str) -> Command {
    let mut command = Command::new("unshare");
    command.arg("-n").arg(std::env::current_exe().unwrap());
    command.args(["--exact", NAME, "--nocapture", "--test-threads=1"]).env(PART, part);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn sockets_of_one_nic_queue_form_a_group_with_one_poller() {
    match std::env::var(PART).as_deref() {
        Ok("host") => return connect_from_host_role(),
        Ok("target") => return accept_in_target_role(),
        _ => {}
    }
    let may = Command::new("unshare").args(["-n", "ip", "link"]).output();
    if !may.is_ok_and(|output| output.status.success()) {
        println!("skipped: it takes root, unshare and ip");
        return;
    }
    let output = role_command("host").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// Creates the card, and connects.
fn connect_from_host_role() {
    let mut target = role_command("target").spawn().unwrap();
    let mut said = BufReader::new(target.stdout.take().unwrap());
    let mut wait_for = |word: &str| {
        let mut line = String::new();
        while !line.contains(word) {
            line.clear();
            assert!(said.read_line(&mut line).unwrap() > 0, "it ended before it was {word}");
        }
    };
    wait_for("there");
    assert!(run_ip_command("link add vq0 type veth peer name vq1"));
    assert!(run_ip_command(&format!("link set vq1 netns {}", target.id())));
    assert!(run_ip_command("addr add 10.98.0.1/24 dev vq0") && run_ip_command("link set vq0 up"));
    // A veth has a receive queue with a NAPI identifier if its end uses GRO and the peer does not
    // send long packets.
    ethtool::set_tso("vq0", false).unwrap();
    wait_for("listening");
    let mut streams: Vec<TcpStream> = (0..CONNECTIONS)
        .map(|_| TcpStream::connect_timeout(&ADDRESS.parse().unwrap(), Duration::from_secs(5)))
        .map(Result::unwrap)
        .collect();
    streams.iter_mut().for_each(|stream| stream.write_all(b"x").unwrap());
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    assert!(target.wait().unwrap().success(), "{rest}");
}

/// Accepts the connection.
fn accept_in_target_role() {
    println!("there");
    let has_come = (0..500).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        run_ip_command("addr add 10.98.0.2/24 dev vq1")
    });
    assert!(has_come && run_ip_command("link set vq1 up"));
    ethtool::set_gro("vq1", true).unwrap();
    let listener = TcpListener::bind(ADDRESS).unwrap();
    println!("listening");
    let options = SocketOptions { busy_poll: Some(BUSY), ..SocketOptions::default() };
    let sockets = SocketStreamFactory::new(RegionTable::new(1), options);
    let mut seen: Vec<OwnedFd> = Vec::new();
    let mut streams = Vec::new();
    for _ in 0..CONNECTIONS {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0]).unwrap();
        seen.push(stream.try_clone().unwrap().into());
        streams.push(sockets.new_stream(stream.into()).unwrap());
    }
    let queues = sockets.receive_queues();
    assert_eq!(queues.iter().map(|(_, count)| *count).collect::<Vec<_>>(), [CONNECTIONS]);
    assert_eq!(polling_sockets(&seen), [false, false, true], "behind queue {}", queues[0].0);
    streams.pop();
    assert_eq!(polling_sockets(&seen[..2]), [false, true]);
    drop(streams);
    assert_eq!(sockets.receive_queues(), []);
}
