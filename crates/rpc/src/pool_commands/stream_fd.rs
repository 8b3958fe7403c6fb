//! Snapshot stream between a job and the client that started it. The job waits for the client, at
//! most as long as the job is wanted and bytes move.

use std::io::{self, ErrorKind, Read, Write};

use tenmil_base::Span;
use tenmil_linux::Clock;
use tenmil_linux::local_socket::{LocalConnection, RecvResult};

/// Job's end of the stream.
pub(super) struct StreamFd<'a> {
    connection: &'a LocalConnection,
    continues: &'a dyn Fn() -> bool,
    clock: Clock,
    /// Longest time without progress.
    still_max: Span,
}

/// Longest time without progress: the client may be changing a tape.
const STALL_TIMEOUT: Span = Span::from_secs(600);
/// Interval at which the job checks whether it is still wanted.
const POLL_INTERVAL: Span = Span::from_ms(100);

impl<'a> StreamFd<'a> {
    /// Creates a stream that fails once `continues` returns false.
    pub(super) fn new(connection: &'a LocalConnection, continues: &'a dyn Fn() -> bool) -> Self {
        Self { connection, continues, clock: Clock::start(), still_max: STALL_TIMEOUT }
    }

    /// Waits until the stream is ready.
    fn wait_until_ready(
        &self,
        wait: fn(&LocalConnection, Span) -> io::Result<bool>,
    ) -> io::Result<()> {
        let until = self.clock.now().after(self.still_max);
        loop {
            if !(self.continues)() {
                return Err(io::Error::other("the job was cancelled"));
            }
            if wait(self.connection, POLL_INTERVAL)? {
                return Ok(());
            }
            if self.clock.now() >= until {
                let text = format!("nothing has moved for {}", self.still_max);
                return Err(io::Error::new(ErrorKind::TimedOut, text));
            }
        }
    }
}

impl Write for StreamFd<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match self.connection.send(bytes)? {
                0 if !bytes.is_empty() => self.wait_until_ready(LocalConnection::wait_to_send)?,
                sent => return Ok(sent),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for StreamFd<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.connection.receive(bytes)? {
                RecvResult::Bytes(count) => return Ok(count),
                RecvResult::Eof => return Ok(0),
                RecvResult::WouldBlock => {
                    self.wait_until_ready(LocalConnection::wait_to_receive)?
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io::{ErrorKind, Read, Write};

    use tenmil_base::Span;
    use tenmil_linux::Clock;
    use tenmil_linux::local_socket::LocalConnection;

    use super::StreamFd;

    #[test]
    fn slow_stream_client_is_awaited_until_timeout_or_cancellation() {
        let (one, _other) = LocalConnection::pair().unwrap();
        let clock = Clock::start();
        let (looks, looks_max) = (Cell::new(0), Cell::new(u32::MAX));
        let continues = || {
            looks.set(looks.get() + 1);
            looks.get() < looks_max.get()
        };
        let still_max = Span::from_ms(250);
        let mut conduit = StreamFd { still_max, ..StreamFd::new(&one, &continues) };
        let began = clock.now();
        let error = conduit.write_all(&vec![7; 4 << 20]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        assert!(clock.now().since(began) >= still_max);
        let error = conduit.read(&mut [0; 8]).unwrap_err();
        assert!(error.to_string().contains("nothing has moved for"), "{error}");
        looks_max.set(looks.get() + 2);
        let still_max = Span::from_secs(20);
        let mut conduit = StreamFd { still_max, ..StreamFd::new(&one, &continues) };
        let began = clock.now();
        let error = conduit.write_all(&[7; 8]).unwrap_err();
        assert!(error.to_string().contains("the job was cancelled"), "{error}");
        assert!(clock.now().since(began) < Span::from_secs(5));
    }

    #[test]
    fn bytes_pass_through_and_a_closed_client_is_detected() {
        let (one, other) = LocalConnection::pair().unwrap();
        let whole = vec![5; 3 << 20];
        let (mut conduit, mut back) = (StreamFd::new(&one, &|| true), Vec::new());
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                StreamFd::new(&other, &|| true).take(3 << 20).read_to_end(&mut back).unwrap();
            });
            conduit.write_all(&whole).unwrap();
            reader.join().unwrap();
        });
        assert!(back == whole);
        drop(other);
        assert_eq!(conduit.read(&mut [0; 8]).unwrap(), 0);
        assert_eq!(conduit.write_all(&whole).unwrap_err().kind(), ErrorKind::BrokenPipe);
    }
}
