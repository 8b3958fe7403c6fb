//! Requests at a fixed rate and event streams, over the Unix socket.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::super::curl;

/// Connections that share the rate.
const CONNECTIONS: u32 = 16;
/// Of so many requests one changes something, which every stream receives as an event.
const CHANGE_OF: u64 = 100;
/// Time limit of a request.
const RESPONSE_MAX: Duration = Duration::from_secs(20);
/// What is read in turn.
const PATHS: [&str; 6] = [
    "/v1/process",
    "/v1/io_statistics",
    "/v1/subsystems",
    "/v1/nvme_connections",
    "/v1/reactors",
    "/v1/threads",
];

/// Running generator.
pub(super) struct Generator {
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
    begun: Instant,
    streams: Vec<UnixStream>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Counts {
    answered: AtomicU64,
    failed: AtomicU64,
    event_bytes: AtomicU64,
}

/// What a generator has done.
#[derive(Clone, Copy, Debug)]
pub(super) struct Generated {
    answered: u64,
    failed: u64,
    event_bytes: u64,
    seconds: f64,
}

impl Generator {
    /// Connects, and starts.
    pub(super) fn start(socket: &Path, per_second: u32, streams: usize) -> Result<Self, String> {
        let connect = || {
            let stream = UnixStream::connect(socket).map_err(|why| format!("connect: {why}"))?;
            stream.set_read_timeout(Some(RESPONSE_MAX)).map_err(|why| why.to_string())?;
            Ok::<_, String>(stream)
        };
        let socket_text = socket.display().to_string();
        // The paths exist: an answer that is an error is not the load that is meant.
        for path in PATHS {
            let url = format!("http://tenmil{path}");
            curl(&["--fail", "-o", "/dev/null", "--unix-socket", &socket_text, &url])?;
        }
        let mut new = Self {
            stop: Arc::default(),
            counts: Arc::default(),
            begun: Instant::now(),
            streams: Vec::new(),
            threads: Vec::new(),
        };
        for _ in 0..streams {
            let mut stream = connect()?;
            let request = b"GET /v1/events HTTP/1.1\r\nhost: tenmil\r\n\r\n";
            stream.write_all(request).map_err(|why| format!("event stream: {why}"))?;
            new.streams.push(stream.try_clone().map_err(|why| why.to_string())?);
            let counts = Arc::clone(&new.counts);
            new.threads.push(std::thread::spawn(move || read_events(stream, &counts)));
        }
        let interval = Duration::from_secs(1) * CONNECTIONS / per_second;
        new.begun = Instant::now();
        for index in 0..CONNECTIONS {
            let (stream, stop, counts) = (connect()?, new.stop.clone(), new.counts.clone());
            let first = new.begun + interval * index / CONNECTIONS;
            let send = move || send_requests(stream, first, interval, &stop, &counts);
            new.threads.push(std::thread::spawn(send));
        }
        Ok(new)
    }

    /// Ends all threads.
    pub(super) fn stop(self) -> Generated {
        self.stop.store(true, Ordering::Relaxed);
        let seconds = self.begun.elapsed().as_secs_f64();
        for stream in &self.streams {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        for thread in self.threads {
            let _ = thread.join();
        }
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Generated {
            answered: count(&self.counts.answered),
            failed: count(&self.counts.failed),
            event_bytes: count(&self.counts.event_bytes),
            seconds,
        }
    }
}

impl Generated {
    /// Answered requests per second.
    pub(super) fn rate(self) -> f64 {
        self.answered as f64 / self.seconds
    }

    /// Whether the load was what was meant: the rate was kept, and the streams have received events.
    pub(super) fn check(all: &[Self], per_second: u32) -> Result<String, String> {
        let rates = all.iter().map(|one| one.rate());
        let least = rates.fold(f64::INFINITY, f64::min);
        let failed: u64 = all.iter().map(|one| one.failed).sum();
        let bytes: u64 = all.iter().map(|one| one.event_bytes).sum();
        let text =
            format!("{least:.0} requests/s at least, {failed} failed, {bytes} bytes of events");
        let is_kept = least >= 0.97 * f64::from(per_second);
        if is_kept && failed == 0 && bytes > 0 { Ok(text) } else { Err(text) }
    }
}

/// Sends a request whenever one is due; one that is late is sent at once.
fn send_requests(
    mut stream: UnixStream,
    first: Instant,
    interval: Duration,
    stop: &AtomicBool,
    counts: &Counts,
) {
    let mut due = first;
    for number in 0_u64.. {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        due += interval;
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let request = if number % CHANGE_OF == CHANGE_OF - 1 {
            let body = r#"{"policy":"static"}"#;
            format!(
                "POST /v1/scheduler HTTP/1.1\r\nhost: tenmil\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            )
        } else {
            let path = PATHS[usize::try_from(number).unwrap_or(0) % PATHS.len()];
            format!("GET {path} HTTP/1.1\r\nhost: tenmil\r\n\r\n")
        };
        let sent = stream.write_all(request.as_bytes());
        match sent.and_then(|()| read_response(&mut stream)) {
            Ok(true) => counts.answered.fetch_add(1, Ordering::Relaxed),
            Ok(false) => counts.failed.fetch_add(1, Ordering::Relaxed),
            Err(_) if stop.load(Ordering::Relaxed) => return,
            Err(_) => {
                counts.failed.fetch_add(1, Ordering::Relaxed);
                return;
            }
        };
    }
}

/// Reads a response; true if its status is 200.
fn read_response(stream: &mut UnixStream) -> std::io::Result<bool> {
    let mut bytes = Vec::new();
    let mut part = [0; 16 << 10];
    loop {
        let count = stream.read(&mut part)?;
        if count == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        bytes.extend_from_slice(&part[..count]);
        if let Some(len) = response_len(&bytes)
            && bytes.len() >= len
        {
            return Ok(bytes.starts_with(b"HTTP/1.1 200 "));
        }
    }
}

/// Length of a response, once its head is there.
fn response_len(bytes: &[u8]) -> Option<usize> {
    let head_len = bytes.windows(4).position(|end| end == b"\r\n\r\n")? + 4;
    let head = String::from_utf8_lossy(&bytes[..head_len]).to_ascii_lowercase();
    let len = head.lines().find_map(|line| line.strip_prefix("content-length:"))?;
    Some(head_len + len.trim().parse::<usize>().ok()?)
}

fn read_events(mut stream: UnixStream, counts: &Counts) {
    let mut bytes = [0; 16 << 10];
    // No event for a while is no end: a stream has comments at least every 15 s.
    while let Ok(count) = stream.read(&mut bytes)
        && count > 0
    {
        counts.event_bytes.fetch_add(count as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::response_len;

    #[test]
    fn length_of_a_response_is_known_with_its_head() {
        assert_eq!(response_len(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n"), None);
        let whole = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";
        assert_eq!(response_len(whole), Some(whole.len()));
    }
}
