//! A proxy that does to TCP connections what networks do: splits, delays, freezes and cuts them.
//!
//! ```text
//!   whoever connects ◀─ stream ─▶ Link ◀─ stream ─▶ target
//!                                  │ a line each way: the fault code of `sim`
//! ```
//!
//! One thread for all connections. It sleeps while nothing comes and nothing is due.

mod link;

use std::io;
use std::net::SocketAddr;

use base::{Instant, Random, Span};
use dma::Regions;
use host::pool::Pool;
use host::socket::{Address, Door, SocketOptions, Sockets};
use host::watch::{Interest, Watch};
use sim::network::LineOptions;

use crate::Refused;
use link::Link;

/// What a proxy does.
#[derive(Clone, Debug)]
pub struct ProxyPlan {
    /// Where it listens; port 0 is any that is free.
    pub listen: SocketAddr,
    /// Where it connects to: `HOST:PORT`.
    pub target: String,
    /// Towards the target.
    pub there: LineOptions,
    /// Towards whoever connected.
    pub back: LineOptions,
    /// Everything that is drawn comes from here. Each connection draws for itself.
    pub seed: u64,
}

/// A proxy and its connections.
pub struct Proxy {
    plan: ProxyPlan,
    door: Door,
    pool: Pool,
    sockets: Sockets,
    random: Random,
    links: Vec<Link>,
    /// How many came so far.
    count: u64,
}

/// How long a target may take to answer.
const CONNECT_MAX: Span = Span::from_secs(10);
/// Names that are looked up at once, and that wait for it.
const LOOK_UPS_MAX: usize = 4;
const WAITING_MAX: usize = 1024;
const READABLE: Interest = Interest { readable: true, writable: false };

impl Proxy {
    /// Listens.
    ///
    /// # Errors
    ///
    /// If it cannot.
    pub fn new(plan: ProxyPlan) -> Result<Self, Refused> {
        let door = Door::open(&Address::Tcp(plan.listen)).map_err(|error| {
            let text = format!("listen on {}: {error}", plan.listen);
            Refused::machine(text).with_hint("port 0 is any that is free: see what is printed")
        })?;
        let sockets = Sockets::new(Regions::new(1), SocketOptions::default());
        let pool = Pool::new(LOOK_UPS_MAX, WAITING_MAX);
        let random = Random::new(plan.seed);
        Ok(Self { plan, door, pool, sockets, random, links: Vec::new(), count: 0 })
    }

    /// Where it listens, with the port that was picked.
    pub fn address(&self) -> &Address {
        self.door.address()
    }

    /// How many connections it has now.
    pub fn connections(&self) -> usize {
        self.links.len()
    }

    /// Takes who comes, and moves what has come. Tells what begins and ends. Returns whether
    /// anything happened.
    pub fn turn(&mut self, now: Instant, tell: &mut dyn FnMut(String)) -> bool {
        let mut moved = self.accept(now, tell);
        for link in &mut self.links {
            moved |= link.turn(now, tell);
        }
        self.links.retain(|link| !link.is_over());
        moved
    }

    /// Sleeps until something comes or is due, for a while at most.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub fn sleep(&mut self, now: Instant, longest: Span) -> io::Result<()> {
        let watch = Watch::new()?;
        watch.add(&self.door, 0, READABLE)?;
        let mut until = now.after(longest);
        let mut stays_awake = false;
        for link in &mut self.links {
            until = until.min(link.wake_at(now));
            stays_awake |= link.arm(now, &watch)?;
        }
        if !stays_awake {
            watch.wait(Some(until.since(now)), &mut Vec::new())?;
        }
        for link in &mut self.links {
            link.disarm();
        }
        Ok(())
    }

    fn accept(&mut self, now: Instant, tell: &mut dyn FnMut(String)) -> bool {
        let socket = match self.door.accept() {
            Ok(Some(socket)) => socket,
            Ok(None) => return false,
            Err(error) => {
                tell(format!("take a connection: {error}"));
                return false;
            }
        };
        self.count += 1;
        let (plan, until) = (&self.plan, now.after(CONNECT_MAX));
        let dial = host::socket::Dial::start(&plan.target, &self.pool, now, until);
        let link = dial.map_err(|error| error.to_string()).and_then(|dial| {
            let options = (plan.there.clone(), plan.back.clone());
            let random = self.random.fork();
            Link::new(self.count, socket, dial, &self.sockets, options, random)
        });
        match link {
            Ok(link) => {
                tell(format!("connection {}: from {}", self.count, link.from()));
                self.links.push(link);
            }
            Err(why) => tell(format!("connection {}: {why}", self.count)),
        }
        true
    }
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Proxy")
            .field("plan", &self.plan)
            .field("links", &self.links.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
