//! Tests of `tcp://` URIs.

use tenmil_base::Error;
use tenmil_base::Span;
use tenmil_block::uri::Uri;
use tenmil_nvme_fabrics::{CacheScope, DigestMode, IoPolicy};

use super::queues_by_type::QueueMapOptions;
use super::tcp_uri::{TcpUri, timeout_rows_of_uri};

fn name(text: &str) -> Result<TcpUri, Error> {
    let uri: Uri = text.parse().unwrap();
    TcpUri::from_uri(&uri).map_err(Error::environment)
}

const NQN: &str = "nqn.2024-01.example:disk";

#[test]
fn uri_is_parsed_into_addresses_and_options() {
    let plain = name(&format!("tcp://127.0.0.1:4420/{NQN}")).unwrap();
    assert_eq!((plain.address.as_str(), plain.namespace), ("127.0.0.1:4420", 1));
    assert_eq!(plain, name(&format!("tcp://127.0.0.1/{NQN}/1")).unwrap());
    let second = name(&format!("tcp://[::1]/{NQN}/2?depth=16")).unwrap();
    assert_eq!((second.address.as_str(), second.namespace), ("[::1]:4420", 2));
    assert_eq!((second.options.subsystem.as_str(), second.depth), (NQN, 16));
    assert_eq!(plain.options.subsystem, NQN);
    assert!(
        plain.options.host.starts_with(tenmil_wire::nqn::UUID_PREFIX),
        "{}",
        plain.options.host
    );
    assert_eq!(plain, name(&format!("tcp://127.0.0.1:4420/{NQN}")).unwrap(), "the same each time");
    let all = "ns=3&depth=16&queues=2&hdgst=yes&ddgst=no&hostnqn=nqn.2024-01.example:me&keep-alive-timeout=2s\
               &connect-timeout=1s&reconnect-delay=500ms&fast-io-fail-timeout=10s&ctrl-loss-timeout=1m&inline-send=no&batch-send=no&msg-more=no\
               &zero-copy=64k&busy-poll=50us&congestion-control=cubic&read-queue=yes";
    let full = name(&format!("tcp://[2001:db8::7]:8009/{NQN}?{all}")).unwrap();
    assert_eq!(full.address, "[2001:db8::7]:8009");
    assert_eq!((full.namespace, full.depth, full.queues), (3, 16, 2));
    let digests = (full.options.header_digest, full.options.data_digest);
    assert_eq!(digests, (DigestMode::Required, DigestMode::Off));
    assert_eq!(full.options.host, "nqn.2024-01.example:me");
    assert_eq!(full.maps, QueueMapOptions { read: true, poll: false });
    assert_eq!(plain.maps, QueueMapOptions::default());
    assert!(plain.options.direct && !full.options.direct);
    let sockets = full.sockets;
    assert!(!sockets.batch_send && !sockets.msg_more);
    assert_eq!(sockets.zero_copy_from_bytes, Some(64 << 10));
    assert_eq!(sockets.busy_poll, Some(Span::from_us(50)));
    assert_eq!(sockets.congestion.as_deref(), Some("cubic"));
    let policy = full.options.policy;
    assert_eq!((policy.detect, policy.retry), (Span::from_secs(2), Span::from_ms(500)));
    assert_eq!((policy.connect, policy.give_up), (Span::from_secs(1), Span::from_secs(60)));
}

#[test]
fn kernel_buffers_are_supported_without_data_digests() {
    let takes = |query: &str| {
        name(&format!("tcp://192.0.2.7:4420/nqn.2024-01.example:disk{query}"))
            .unwrap()
            .supports_kernel_buffers()
    };
    for query in ["", "?hdgst=yes", "?read-queue=yes", "?zero-copy=no"] {
        assert_eq!(takes(query), Ok(1), "{query}");
    }
    assert!(takes("?ddgst=yes").unwrap_err().text.contains("digest"));
    assert!(takes("?key=a").unwrap_err().text.contains("encrypted"));
    let mut by_ring = name("tcp://192.0.2.7:4420/nqn.2024-01.example:disk").unwrap();
    by_ring.sockets.engine = tenmil_linux::socket::SocketEngine::IoUring;
    assert!(by_ring.supports_kernel_buffers().unwrap_err().text.contains("expected epoll"));
}

#[test]
fn invalid_uri_is_rejected_with_the_expected_form() {
    for (text, expected) in [
        ("tcp:4420", "no subsystem at `4420`, expected tcp://HOST:PORT/NQN"),
        ("tcp://127.0.0.1:4420", "no subsystem at `//127.0.0.1:4420`, expected"),
        ("tcp://127.0.0.1:4420/disk", "subsystem `disk`: NQN does not begin with nqn."),
        ("tcp://a:1/nqn.2024-01.example:d/0", "ns is `0`, expected a number from 1 to"),
        ("tcp://a:1/nqn.2024-01.example:d?ns=0", "ns is `0`, expected a number from 1 to"),
        (
            "tcp://a:1/nqn.2024-01.example:d?ctrl-loss-timeout=0s",
            "ctrl-loss-timeout is 0 ns, expected 100 ms to 8 hours",
        ),
        ("tcp://a:1/nqn.2024-01.example:d?colour=1", "no parameter `colour`, expected ns"),
    ] {
        let problem = name(text).unwrap_err();
        assert!(problem.text.contains(expected), "{problem}");
    }
}

#[test]
fn several_addresses_are_paths_to_one_namespace() {
    let two = name(&format!("tcp://127.0.0.1:4420,[::1]:8009/{NQN}?iopolicy=round-robin")).unwrap();
    assert_eq!(two.addresses().collect::<Vec<_>>(), ["127.0.0.1:4420", "[::1]:8009"]);
    assert_eq!((two.io_policy, two.others.len()), (IoPolicy::RoundRobin, 1));
    let plain = name(&format!("tcp://a:1,b:1/{NQN}")).unwrap();
    assert_eq!((plain.io_policy, plain.cache), (IoPolicy::ActivePassive, CacheScope::Shared));
    let separate = name(&format!("tcp://a:1,b:1/{NQN}?write-cache=separate")).unwrap();
    assert_eq!(separate.cache, CacheScope::Separate);
    for (text, expected) in [
        (format!("tcp://a:1,/{NQN}"), "a path has no address, expected HOST:PORT,HOST:PORT"),
        (format!("tcp://a:1,a:1/{NQN}"), "a:1 is given twice, expected each path once"),
        (format!("tcp://a:1/{NQN}?iopolicy=round-robin"), "iopolicy is for several paths"),
        (format!("tcp://a:1/{NQN}?write-cache=shared"), "write-cache is for several paths"),
        (format!("tcp://a:1,b:1/{NQN}?iopolicy=x"), "expected active-passive, round-robin or"),
    ] {
        let problem = name(&text).unwrap_err();
        assert!(problem.text.contains(expected), "{problem}");
    }
}

#[test]
fn timeout_rows_are_listed_with_and_without_a_uri() {
    let words: Vec<_> = timeout_rows_of_uri(None).unwrap().iter().map(|row| row.key).collect();
    assert_eq!(
        words,
        [
            "keep-alive-timeout",
            "connect-timeout",
            "reconnect-delay",
            "fast-io-fail-timeout",
            "ctrl-loss-timeout"
        ]
    );
    let rows = timeout_rows_of_uri(Some(&format!("tcp://a:1/{NQN}?reconnect-delay=3s"))).unwrap();
    assert_eq!(rows[2].span, Span::from_secs(3));
    let refused = timeout_rows_of_uri(Some("ram:1m")).unwrap_err();
    assert!(refused.text.contains("only a device behind a network has a policy"), "{refused}");
}
