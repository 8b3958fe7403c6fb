//! Handshakes and records with OpenSSL and GnuTLS at the other end. A peer that is not installed is
//! skipped, and the test prints so.

#![expect(clippy::unwrap_used, reason = "a test may")]
#![expect(clippy::disallowed_methods, reason = "peers are processes with sockets")]

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use tenmil_base::{RecvResult, SendSlice, Span, Stream, WakeSource};
use tenmil_dma::RegionTable;
use tenmil_linux::poll_set::{Interest, PollSet};
use tenmil_linux::socket::{SocketOptions, SocketStreamFactory};
use tenmil_nvme_auth::{
    ConfiguredPsk, Derivation, Hash, IdentityVersion, KeyHash, SecretBytes, tls_psk,
};
use tenmil_tls::{ClientConfig, Psk, ServerConfig, TlsError, TlsSession, TlsStream};

/// Time that a peer has for everything.
const PATIENCE: Duration = Duration::from_secs(20);

/// Peer process. Killed on drop.
struct Peer {
    process: Child,
    input: Option<ChildStdin>,
    output: Receiver<String>,
}

impl Peer {
    /// Starts a program; `None` if it is not installed.
    fn start(program: &str, arguments: &[&str]) -> Option<Self> {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        command.stderr(Stdio::piped());
        let Ok(mut process) = command.spawn() else {
            eprintln!("skipped: {program} is not installed");
            return None;
        };
        let (lines, output) = channel();
        let streams: [Box<dyn std::io::Read + Send>; 2] =
            [Box::new(process.stdout.take().unwrap()), Box::new(process.stderr.take().unwrap())];
        for stream in streams {
            let lines = lines.clone();
            std::thread::spawn(move || {
                for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
                    let _ = lines.send(String::from_utf8_lossy(&line).into_owned());
                }
            });
        }
        let input = process.stdin.take();
        Some(Self { process, input, output })
    }

    fn write(&mut self, text: &str) {
        let input = self.input.as_mut().unwrap();
        input.write_all(text.as_bytes()).unwrap();
        input.flush().unwrap();
    }

    /// Reads lines until one contains `text`, and returns that one.
    fn expect(&self, text: &str) -> String {
        let mut read = String::new();
        while let Ok(line) = self.output.recv_timeout(PATIENCE) {
            if line.contains(text) {
                return line;
            }
            read = format!("{read}{line}\n");
        }
        panic!("the peer does not print `{text}`, but:\n{read}");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Our end, blocking.
struct End(TlsStream);

impl End {
    fn new(socket: TcpStream, session: TlsSession) -> Self {
        let regions = RegionTable::new(1);
        let factory = SocketStreamFactory::new(regions.clone(), SocketOptions::default());
        Self(TlsStream::new(factory.new_stream(socket.into()).unwrap(), session, regions))
    }

    fn wait(&mut self) {
        let watch = PollSet::new().unwrap();
        if !self.0.arm(true, false) {
            let WakeSource::Descriptor(descriptor) = self.0.wake_source() else { panic!() };
            watch.add(descriptor, 0, Interest { readable: true, writable: false }).unwrap();
            let mut found = Vec::new();
            watch.wait(Some(Span::from_secs(20)), &mut found).unwrap();
            assert!(!found.is_empty(), "the peer sends nothing");
        }
        self.0.disarm();
    }

    fn handshake(&mut self) -> Result<(), TlsError> {
        while !self.0.poll_handshake()? {
            self.wait();
        }
        Ok(())
    }

    fn send(&mut self, bytes: &[u8]) {
        let len_bytes = u32::try_from(bytes.len()).unwrap();
        let slices = [SendSlice::Headers { at: 0, len_bytes }];
        assert_eq!(self.0.send(bytes, &slices, false), Ok(bytes.len()));
        while self.0.released_bytes() == 0 {}
    }

    /// Receives until the bytes contain `text`.
    fn expect(&mut self, text: &str) {
        loop {
            let bytes = self.0.buffered();
            if bytes.windows(text.len()).any(|window| window == text.as_bytes()) {
                let count = bytes.len();
                return self.0.consume(count);
            }
            match self.0.receive() {
                RecvResult::Bytes(_) => {}
                RecvResult::WouldBlock => self.wait(),
                end => panic!("{end:?} before {text}"),
            }
        }
    }

    fn expect_end(&mut self) -> RecvResult {
        loop {
            match self.0.receive() {
                RecvResult::WouldBlock => self.wait(),
                RecvResult::Bytes(_) => {}
                end => return end,
            }
        }
    }
}

fn key(hash: Hash) -> Psk {
    let secret = SecretBytes::new((1..=48).take(hash.len_bytes()).collect());
    let configured = ConfiguredPsk::generate(KeyHash::Transform(hash), secret).unwrap();
    let (version, derivation) = (IdentityVersion::One, Derivation::Specification);
    // Without a colon, which separates identity and key in a file of GnuTLS.
    tls_psk(&configured, version, derivation, "nqn.2014-08.org.host", "nqn.2026-01.io.sub")
        .unwrap()
        .into()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn identity(psk: &Psk) -> &str {
    std::str::from_utf8(&psk.identity).unwrap()
}

/// Session file of OpenSSL with a key of SHA-384: its option `-psk` means SHA-256.
fn write_openssl_session(psk: &Psk, path: &Path) {
    let tagged =
        |tag: u8, bytes: &[u8]| [&[tag, u8::try_from(bytes.len()).unwrap()], bytes].concat();
    let fields = [
        tagged(2, &[1]),
        tagged(2, &[3, 4]),
        tagged(4, &[0x13, 0x02]),
        tagged(4, &[]),
        tagged(4, psk.secret.expose()),
    ];
    let der = tagged(0x30, &fields.concat());
    let base64 = {
        const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let digits = |chunk: &[u8]| -> String {
            let word = (0..3)
                .fold(0_u32, |word, at| word << 8 | u32::from(chunk.get(at).copied().unwrap_or(0)));
            (0..4)
                .map(|at| match at <= chunk.len() {
                    true => char::from(DIGITS[(word >> (18 - 6 * at) & 63) as usize]),
                    false => '=',
                })
                .collect()
        };
        der.chunks(3).map(digits).collect::<String>()
    };
    let lines: Vec<&str> =
        base64.as_bytes().chunks(64).map(|line| std::str::from_utf8(line).unwrap()).collect();
    let text = format!(
        "-----BEGIN SSL SESSION PARAMETERS-----\n{}\n-----END SSL SESSION PARAMETERS-----\n",
        lines.join("\n")
    );
    std::fs::write(path, text).unwrap();
}

fn server_session(psk: &Psk) -> TlsSession {
    TlsSession::server(&ServerConfig::with_psks(Arc::new(vec![psk.clone()])).unwrap()).unwrap()
}

fn client_session(psk: &Psk) -> TlsSession {
    TlsSession::client(&ClientConfig::with_psks([psk.clone()]).unwrap()).unwrap()
}

fn assert_suite(end: &End, hash: Hash) {
    let expected = match hash {
        Hash::Sha256 => "TLS_AES_128_GCM_SHA256",
        _ => "TLS_AES_256_GCM_SHA384",
    };
    assert_eq!(end.0.secure_channel().unwrap().cipher_suite, expected);
}

/// Connects to a peer that has just been started.
fn connect(port: u16) -> TcpStream {
    let start = std::time::Instant::now();
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(socket) => return socket,
            Err(_) if start.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(20)),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Port that is free now.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// OpenSSL client of our server.
fn openssl_client(psk: &Psk, port: u16, directory: &Path) -> Option<Peer> {
    let address = format!("127.0.0.1:{port}");
    let session = directory.join("session");
    let secret = hex(psk.secret.expose());
    let key = match psk.hash {
        Hash::Sha256 => ["-psk", secret.as_str()],
        _ => {
            write_openssl_session(psk, &session);
            ["-psk_session", session.to_str().unwrap()]
        }
    };
    let mut arguments = vec!["s_client", "-connect", &address, "-tls1_3", "-no_ign_eof"];
    arguments.extend(["-psk_identity", identity(psk)]);
    arguments.extend(key);
    Peer::start("openssl", &arguments)
}

#[test]
fn openssl_client_talks_to_our_server() {
    for hash in [Hash::Sha256, Hash::Sha384] {
        let directory = tempfile::tempdir().unwrap();
        let psk = key(hash);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let Some(mut peer) = openssl_client(&psk, port, directory.path()) else { return };
        let mut end = End::new(listener.accept().unwrap().0, server_session(&psk));
        end.handshake().unwrap();
        assert_suite(&end, hash);
        peer.write("hello\n");
        end.expect("hello\n");
        // A KeyUpdate that requests one of ours.
        peer.write("K\n");
        peer.expect("KEYUPDATE");
        peer.write("after its key update\n");
        end.expect("after its key update\n");
        end.send(b"after both key updates\n");
        peer.expect("after both key updates");
        end.0.update_keys().unwrap();
        end.send(b"after our key update\n");
        peer.expect("after our key update");
        let large = [b'x'; 100_000];
        end.send(&large);
        end.send(b"\nthe end\n");
        peer.expect("the end");
        peer.write("Q\n");
        assert_eq!(end.expect_end(), RecvResult::Eof);
    }
}

/// Lengths of lines around those of blocks and records.
const LINES: [usize; 12] = [1, 2, 15, 16, 17, 1023, 1100, 5000, 16_383, 16_384, 16_385, 50_000];

#[test]
fn lines_of_many_lengths_pass_between_key_updates_with_openssl() {
    for hash in [Hash::Sha256, Hash::Sha384] {
        let directory = tempfile::tempdir().unwrap();
        let psk = key(hash);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let Some(mut peer) = openssl_client(&psk, port, directory.path()) else { return };
        let mut end = End::new(listener.accept().unwrap().0, server_session(&psk));
        end.handshake().unwrap();
        for (round, len) in LINES.into_iter().enumerate() {
            // A letter that is no command of OpenSSL.
            let line = format!("{}end{round}\n", "x".repeat(len));
            end.send(line.as_bytes());
            let found = peer.expect(&format!("end{round}"));
            assert_eq!(found.len(), len + 4 + usize::from(round > 9), "{hash}, {len}");
            peer.write(&line);
            end.expect(&line);
            if round % 3 == 0 {
                end.0.update_keys().unwrap();
            }
            if round % 3 == 1 {
                // `K` requests a KeyUpdate of ours, `k` does not.
                peer.write(if round % 2 == 0 { "K\n" } else { "k\n" });
                peer.expect("KEYUPDATE");
            }
        }
        end.0.shutdown_write();
        peer.expect("closed");
    }
}

#[test]
fn openssl_client_without_the_key_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let psk = key(Hash::Sha256);
    let wrong = Psk { secret: SecretBytes::new(vec![9; 32]), ..psk.clone() };
    let stranger = Psk { identity: b"NVMe1R01 nqn.other nqn.sub x".to_vec(), ..psk.clone() };
    for (client, expected, alert) in [
        (wrong, "wrong-key", "decrypt error"),
        (stranger, "unknown-identity", "unknown psk identity"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let Some(peer) = openssl_client(&client, port, directory.path()) else { return };
        let mut end = End::new(listener.accept().unwrap().0, server_session(&psk));
        assert_eq!(end.handshake().unwrap_err().name(), expected);
        // The alert is sent with the next flush.
        let _ = end.0.receive();
        peer.expect(alert);
    }
}

#[test]
fn our_client_talks_to_an_openssl_server() {
    for hash in [Hash::Sha256, Hash::Sha384] {
        let directory = tempfile::tempdir().unwrap();
        let psk = key(hash);
        let session = directory.path().join("session");
        let secret = hex(psk.secret.expose());
        let key = match hash {
            Hash::Sha256 => ["-psk", secret.as_str()],
            _ => {
                write_openssl_session(&psk, &session);
                ["-psk_session", session.to_str().unwrap()]
            }
        };
        let mut arguments = vec!["s_server", "-accept", "127.0.0.1:0", "-tls1_3", "-nocert"];
        // Tickets are records after the handshake, which our client ignores.
        let tickets = if hash == Hash::Sha256 { "3" } else { "0" };
        arguments.extend(["-num_tickets", tickets, "-psk_identity", identity(&psk)]);
        if hash == Hash::Sha384 {
            // It selects a suite first, the client's first one, and then ignores keys of others.
            arguments.extend(["-ciphersuites", "TLS_AES_256_GCM_SHA384"]);
        }
        arguments.extend(key);
        let Some(mut peer) = Peer::start("openssl", &arguments) else { return };
        let port = peer.expect("ACCEPT").rsplit_once(':').unwrap().1.trim().parse().unwrap();
        let mut end = End::new(connect(port), client_session(&psk));
        end.handshake().unwrap();
        assert_suite(&end, hash);
        end.send(b"hello\n");
        peer.expect("hello");
        assert_eq!(end.0.receive(), RecvResult::WouldBlock);
        peer.write("K\n");
        // Its KeyUpdate arrives; what is written before that would be part of the command.
        end.wait();
        assert_eq!(end.0.receive(), RecvResult::WouldBlock);
        peer.write("after a key update\n");
        end.expect("after a key update");
        end.send(b"goodbye\n");
        peer.expect("goodbye");

        let wrong = Psk { secret: SecretBytes::new(vec![9; hash.len_bytes()]), ..psk };
        end.0.shutdown_write();
        drop(end);
        let mut end = End::new(connect(port), client_session(&wrong));
        let error = end.handshake().unwrap_err();
        assert_eq!(error.name(), "key-refused", "{error}");
    }
}

/// TLS 1.3 with a pre-shared key, as `tlshd` asks GnuTLS for it.
const GNUTLS_PRIORITY: &str =
    "NORMAL:-VERS-ALL:+VERS-TLS1.3:-KX-ALL:+ECDHE-PSK:+DHE-PSK:-CIPHER-ALL:+AES-128-GCM";

#[test]
fn gnutls_client_talks_to_our_server() {
    let psk = key(Hash::Sha256);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let secret = hex(psk.secret.expose());
    let arguments = [
        "--priority",
        GNUTLS_PRIORITY,
        "--pskusername",
        identity(&psk),
        "--pskkey",
        &secret,
        "-p",
        &port,
        "127.0.0.1",
    ];
    let Some(mut peer) = Peer::start("gnutls-cli", &arguments) else { return };
    let mut end = End::new(listener.accept().unwrap().0, server_session(&psk));
    end.handshake().unwrap();
    assert_suite(&end, Hash::Sha256);
    peer.write("hello\n");
    end.expect("hello\n");
    end.send(b"goodbye\n");
    peer.expect("goodbye");
    end.0.shutdown_write();
    peer.expect("Peer has closed");
}

#[test]
fn our_client_talks_to_a_gnutls_server() {
    let directory = tempfile::tempdir().unwrap();
    let psk = key(Hash::Sha256);
    let keys = directory.path().join("keys");
    std::fs::write(&keys, format!("{}:{}\n", identity(&psk), hex(psk.secret.expose()))).unwrap();
    let port = free_port();
    let port_text = port.to_string();
    let arguments = [
        "--echo",
        "--priority",
        GNUTLS_PRIORITY,
        "--pskpasswd",
        keys.to_str().unwrap(),
        "-p",
        &port_text,
    ];
    let Some(_peer) = Peer::start("gnutls-serv", &arguments) else { return };
    let mut end = End::new(connect(port), client_session(&psk));
    end.handshake().unwrap();
    assert_suite(&end, Hash::Sha256);
    end.send(b"hello\n");
    end.expect("hello\n");
    drop(end);
    let wrong = Psk { secret: SecretBytes::new(vec![9; 32]), ..psk };
    let mut end = End::new(connect(port), client_session(&wrong));
    assert_eq!(end.handshake().unwrap_err().name(), "key-refused");
}
