//! Send and receive: a snapshot as a stream out of a pool, or into one.
//!
//! ```text
//!   local:   pool ── standard output
//!   remote:  pool ── job ══ Unix stream ══ this process ── standard output
//! ```
//!
//! The process that has the pool open is given one end of a new Unix stream instead of this process's
//! standard output. So it never blocks on an unknown device or terminal, I/O errors of this process are
//! reported here, and if either process ends, the other one reads the end of the stream. One thread
//! carries the bytes while another one polls the job; a job that is not polled cancels itself.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, channel};

use serde_json::Value;
use tenmil_base::{Error, Span};
use tenmil_linux::NamedThread;
use tenmil_linux::local_socket::{LocalConnection, RecvResult};
use tenmil_rpc::pool_commands::{JobKind, JobSpec, JobStream};

use super::super::volume::stream_commands::StreamProgressBar;
use super::{PoolAccess, PoolOfOtherProcess};

/// Buffer size of a stream copy.
const BUFFER_BYTES: usize = 256 << 10;
/// Longest wait for the stream to become ready.
const WAIT_MAX: Span = Span::from_secs(1);

impl PoolAccess<'_> {
    /// Writes the stream of a snapshot to `out`, in full or relative to `from`. Returns the summary.
    pub(in crate::commands) fn send_snapshot(
        &mut self,
        name: &str,
        from: Option<&str>,
        out: &mut dyn Write,
        mut progress: StreamProgressBar<'_>,
    ) -> Result<Value, Error> {
        let what = JobKind::Send { name: name.to_owned(), from: from.map(str::to_owned) };
        let long = JobSpec { what, rate_bytes: None, unheard_max: None };
        let done = match self {
            Self::Here { open, .. } => {
                let way = JobStream::Out(out);
                long.execute_job(open, tenmil::KINDS, way, &mut |done| progress.update(done))
            }
            Self::Remote(there) => there.send_snapshot(&long, out, &mut progress),
        };
        progress.end();
        done
    }

    /// Creates a snapshot from the stream on standard input. Returns the summary.
    pub(in crate::commands) fn receive_snapshot(&mut self, name: &str) -> Result<Value, Error> {
        let what = JobKind::Receive(name.to_owned());
        let long = JobSpec { what, rate_bytes: None, unheard_max: None };
        let mut progress = StreamProgressBar::new(self.device_opener(), "receiving");
        let done = match self {
            Self::Here { open, .. } => {
                let mut input = io::stdin().lock();
                let way = JobStream::In(&mut input);
                long.execute_job(open, tenmil::KINDS, way, &mut |done| progress.update(done))
            }
            Self::Remote(there) => there.receive_snapshot(&long, name, &mut progress),
        };
        progress.end();
        done
    }
}

impl PoolOfOtherProcess<'_> {
    /// Starts a job with one end of a stream. Returns the job's row and the other end.
    fn begin_with_stream(&mut self, long: &JobSpec) -> Result<(Value, LocalConnection), Error> {
        let (ours, theirs) = LocalConnection::pair()
            .map_err(|error| Error::environment(format!("make a stream: {error}")))?;
        let job = self.start_job(long, &[theirs.as_fd()])?;
        Ok((job, ours))
    }

    fn send_snapshot(
        &mut self,
        long: &JobSpec,
        out: &mut dyn Write,
        progress: &mut StreamProgressBar<'_>,
    ) -> Result<Value, Error> {
        let (job, ours) = self.begin_with_stream(long)?;
        let device = self.device.clone();
        std::thread::scope(|scope| {
            let asker = scope.spawn(|| {
                self.wait_for_job(job, &mut |done| {
                    progress.update(done);
                })
            });
            let written = copy_stream_to(&ours, out);
            // Closing this end makes further writes of the job fail at once.
            drop(ours);
            let ended = asker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            written.map_err(|error| {
                Error::environment(format!("{device}: write the stream: {error}"))
            })?;
            ended.map(Option::unwrap_or_default)
        })
    }

    fn receive_snapshot(
        &mut self,
        long: &JobSpec,
        name: &str,
        progress: &mut StreamProgressBar<'_>,
    ) -> Result<Value, Error> {
        let (job, ours) = self.begin_with_stream(long)?;
        let broken = pump_stdin(ours)?;
        let ended = self.wait_for_job(job, &mut |done| {
            progress.update(done);
        });
        match (ended, broken.try_recv()) {
            // The job only reports a truncated stream; the read error here is its cause.
            (Err(_), Ok(error)) => {
                let text = format!("{}: receive `{name}`: read the stream: {error}", self.device);
                Err(Error::environment(text))
            }
            (ended, _) => ended.map(Option::unwrap_or_default),
        }
    }
}

/// Copies the stream to `out` until it ends. Returns write errors only: a read error looks like the end
/// of the stream here, and the job reports its cause.
fn copy_stream_to(stream: &LocalConnection, out: &mut dyn Write) -> io::Result<()> {
    let mut bytes = vec![0; BUFFER_BYTES];
    loop {
        match stream.receive(&mut bytes) {
            Ok(RecvResult::Bytes(count)) => out.write_all(&bytes[..count])?,
            // A signal ends the wait early.
            Ok(RecvResult::WouldBlock) => drop(stream.wait_to_receive(WAIT_MAX)?),
            Ok(RecvResult::Eof) | Err(_) => return out.flush(),
        }
    }
}

/// Starts a thread that copies standard input to the stream, until either ends. The thread is detached,
/// because it may block on an idle standard input. Read errors arrive at the returned receiver.
fn pump_stdin(stream: LocalConnection) -> Result<Receiver<io::Error>, Error> {
    let (tell, reported_values) = channel();
    let body =
        move |_: &tenmil_linux::StopFlag| match copy_to_stream(&mut io::stdin().lock(), &stream) {
            // The receiving job has ended; its own error has the reason.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
            Err(error) => drop(tell.send(error)),
            Ok(()) => drop(stream.shutdown_write()),
        };
    let thread = NamedThread::spawn("stream", None, body)
        .map_err(|error| Error::environment(format!("start a thread: {error}")))?;
    std::mem::forget(thread);
    Ok(reported_values)
}

fn copy_to_stream(input: &mut dyn Read, stream: &LocalConnection) -> io::Result<()> {
    let mut bytes = vec![0; BUFFER_BYTES];
    loop {
        let count = match input.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let mut left = &bytes[..count];
        while !left.is_empty() {
            let gone = |_| io::Error::from(ErrorKind::BrokenPipe);
            match stream.send(left).map_err(gone)? {
                0 => drop(stream.wait_to_send(WAIT_MAX).map_err(gone)?),
                sent => left = &left[sent..],
            }
        }
    }
}
