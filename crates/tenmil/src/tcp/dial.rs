//! Dialling, over sockets of this machine.

use base::{Broken, Instant, Stream, WakeSource};
use dma::Regions;
use host::pool::Pool;
use host::socket::{self, SocketOptions, Sockets};
use remote::{Dial, Dialled};

/// Calls one address.
pub(super) struct Caller {
    address: String,
    pool: Pool,
    /// Each thread that uses a stream has inboxes of its own.
    sockets: Sockets,
}

/// A call that is under way.
struct Call {
    dial: Option<socket::Dial>,
    /// Why there is none.
    problem: Option<String>,
    sockets: Sockets,
}

/// Names that are looked up at a time, and wait for that.
const LOOK_UPS: usize = 1;
const WAITING: usize = 64;

impl Caller {
    pub(super) fn new(address: &str, regions: &Regions, options: &SocketOptions) -> Self {
        let pool = Pool::new(LOOK_UPS, WAITING);
        let sockets = Sockets::new(regions.clone(), options.clone());
        Self { address: address.to_owned(), pool, sockets }
    }
}

impl Dial for Caller {
    fn dial(&mut self, now: Instant, until: Instant) -> Box<dyn Dialled> {
        let (dial, problem) = match socket::Dial::start(&self.address, &self.pool, now, until) {
            Ok(dial) => (Some(dial), None),
            Err(error) => (None, Some(error.to_string())),
        };
        Box::new(Call { dial, problem, sockets: self.sockets.apart() })
    }

    fn peer(&self) -> String {
        format!("tcp://{}", self.address)
    }
}

impl Dialled for Call {
    fn poll(&mut self, now: Instant) -> Option<Result<Box<dyn Stream>, Broken>> {
        if let Some(problem) = self.problem.take() {
            return Some(Err(Broken(problem)));
        }
        Some(match self.dial.as_mut()?.poll(now)? {
            Ok(socket) => self.sockets.stream(socket).map_err(|error| Broken(error.to_string())),
            Err(error) => Err(Broken(error.to_string())),
        })
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.dial.as_ref().map_or(WakeSource::Nothing, socket::Dial::wake_source)
    }
}
