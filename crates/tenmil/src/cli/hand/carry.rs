//! A snapshot that goes out of a store, or comes into one, as a stream.
//!
//! ```text
//!   here:   store ── standard output
//!   there:  store ── job ══ Unix stream ══ this process ── standard output
//! ```
//!
//! The process that has the store is given one end of a stream that is made for this, and not this
//! process's own output: so it never waits for a device or a terminal that it does not know, what goes
//! wrong here is told here, and whichever of the two goes, the other one meets the end of the stream.
//! While one thread carries the bytes another one asks how far the job is; a job that nobody asks about
//! stops.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, channel};

use base::Span;
use control::orders::{Long, Way, What};
use host::Thread;
use host::local_socket::{Connection, Received};
use serde_json::Value;

use super::super::volume::stream::Progress;
use super::{Hand, There};
use crate::Refused;

/// Bytes that are carried at once.
const PIECE: usize = 256 << 10;
/// How long nothing may come before it is looked again.
const LOOK: Span = Span::from_secs(1);

impl Hand<'_> {
    /// Writes a snapshot to `out`, or what it has that another one has not. Returns what is told of it.
    pub(in crate::cli) fn send(
        &mut self,
        name: &str,
        from: Option<&str>,
        out: &mut dyn Write,
        mut progress: Progress<'_>,
    ) -> Result<Value, Refused> {
        let what = What::Send { name: name.to_owned(), from: from.map(str::to_owned) };
        let long = Long { what, rate_bytes: None, unheard_max: None };
        let done = match self {
            Self::Here { open, .. } => {
                let way = Way::Out(out);
                long.carry_out(open, crate::KINDS, way, &mut |done| progress.turn(done))
                    .map_err(Refused::from)
            }
            Self::There(there) => there.send(&long, out, &mut progress),
        };
        progress.end();
        done
    }

    /// Makes a snapshot of what comes from standard input. Returns what is told of it.
    pub(in crate::cli) fn receive(&mut self, name: &str) -> Result<Value, Refused> {
        let what = What::Receive(name.to_owned());
        let long = Long { what, rate_bytes: None, unheard_max: None };
        let mut progress = Progress::new(self.opener(), "receiving");
        let done = match self {
            Self::Here { open, .. } => {
                let mut input = io::stdin().lock();
                let way = Way::In(&mut input);
                long.carry_out(open, crate::KINDS, way, &mut |done| progress.turn(done))
                    .map_err(Refused::from)
            }
            Self::There(there) => there.receive(&long, name, &mut progress),
        };
        progress.end();
        done
    }
}

impl There<'_> {
    /// Begins a job with one end of a stream. Returns the job's row and the other end.
    fn begin_with_stream(&mut self, long: &Long) -> Result<(Value, Connection), Refused> {
        let (ours, theirs) = Connection::pair()
            .map_err(|error| Refused::machine(format!("make a stream: {error}")))?;
        let job = self.begin(long, &[theirs.as_fd()])?;
        Ok((job, ours))
    }

    fn send(
        &mut self,
        long: &Long,
        out: &mut dyn Write,
        progress: &mut Progress<'_>,
    ) -> Result<Value, Refused> {
        let (job, ours) = self.begin_with_stream(long)?;
        let device = self.device.clone();
        std::thread::scope(|scope| {
            let asker = scope.spawn(|| {
                self.see_it_through(job, &mut |done| {
                    progress.turn(done);
                })
            });
            let written = write_all(&ours, out);
            // Whoever still writes into it finds that out now.
            drop(ours);
            let ended = asker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            written.map_err(|error| {
                Refused::machine(format!("{device}: write the stream: {error}"))
            })?;
            ended.map(Option::unwrap_or_default)
        })
    }

    fn receive(
        &mut self,
        long: &Long,
        name: &str,
        progress: &mut Progress<'_>,
    ) -> Result<Value, Refused> {
        let (job, ours) = self.begin_with_stream(long)?;
        let broken = feed(ours)?;
        let ended = self.see_it_through(job, &mut |done| {
            progress.turn(done);
        });
        match (ended, broken.try_recv()) {
            // For the other process it was cut.
            (Err(_), Ok(error)) => {
                let text = format!("{}: receive `{name}`: read the stream: {error}", self.device);
                Err(Refused::machine(text))
            }
            (ended, _) => ended.map(Option::unwrap_or_default),
        }
    }
}

/// Writes what comes until no more does. The error is one of writing: of what comes, its end is all that
/// can be said here.
fn write_all(stream: &Connection, out: &mut dyn Write) -> io::Result<()> {
    let mut bytes = vec![0; PIECE];
    loop {
        match stream.receive(&mut bytes) {
            Ok(Received::Bytes(count)) => out.write_all(&bytes[..count])?,
            // A signal makes it come back early.
            Ok(Received::Nothing) => drop(stream.wait_to_receive(LOOK)?),
            Ok(Received::End) | Err(_) => return out.flush(),
        }
    }
}

/// Has a thread carry what comes from standard input, until it ends or nobody takes it. It is not waited
/// for: it may wait for somebody who says nothing. What went wrong with the input is told.
fn feed(stream: Connection) -> Result<Receiver<io::Error>, Refused> {
    let (tell, told) = channel();
    let body = move |_: &host::Stop| match carry(&mut io::stdin().lock(), &stream) {
        // Nobody takes it any more, and why is told elsewhere.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
        Err(error) => drop(tell.send(error)),
        Ok(()) => drop(stream.finish()),
    };
    let thread = Thread::spawn("stream", None, body)
        .map_err(|error| Refused::machine(format!("start a thread: {error}")))?;
    std::mem::forget(thread);
    Ok(told)
}

fn carry(input: &mut dyn Read, stream: &Connection) -> io::Result<()> {
    let mut bytes = vec![0; PIECE];
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
                0 => drop(stream.wait_to_send(LOOK).map_err(gone)?),
                sent => left = &left[sent..],
            }
        }
    }
}
