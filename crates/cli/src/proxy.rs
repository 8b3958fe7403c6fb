//! TCP proxy with fault injection: fragments, delays, freezes and cuts connections.
//!
//! ```text
//!   client ◀─ stream ─▶ ProxiedConnection ◀─ stream ─▶ target
//!                          │ one fault line per direction, from the crate `sim`
//! ```
//!
//! One thread serves all connections. It sleeps while no bytes arrive and no timer is due.

mod proxied_connection;

use std::io;
use std::net::SocketAddr;

use tenmil_base::{Instant, Random, Span};
use tenmil_dma::RegionTable;
use tenmil_linux::poll_set::{Interest, PollSet};
use tenmil_linux::socket::{ListenAddress, SocketOptions, SocketStreamFactory, StreamListener};
use tenmil_linux::thread_pool::ThreadPool;
use tenmil_sim::sim_network::LinkOptions;

use proxied_connection::ProxiedConnection;
use tenmil_base::Error;

/// Configuration of a proxy.
#[derive(Clone, Debug)]
pub struct ProxyConfig {
    /// Listen address; port 0 picks a free port.
    pub listen: SocketAddr,
    /// Address to connect to: `HOST:PORT`.
    pub target: String,
    /// Faults of the direction towards the target.
    pub there: LinkOptions,
    /// Faults of the direction towards the client.
    pub back: LinkOptions,
    /// Seed of all random numbers. Each connection has a generator of its own.
    pub seed: u64,
}

/// Proxy with its connections.
pub struct FaultProxy {
    plan: ProxyConfig,
    listener: StreamListener,
    pool: ThreadPool,
    sockets: SocketStreamFactory,
    random: Random,
    links: Vec<ProxiedConnection>,
    /// Number of connections accepted so far.
    count: u64,
}

/// Time limit for connecting to the target.
const CONNECT_MAX: Span = Span::from_secs(10);
/// Name lookups in progress, and waiting, at a time.
const LOOKUPS_MAX: usize = 4;
const WAITING_MAX: usize = 1024;
const READABLE: Interest = Interest { readable: true, writable: false };

impl FaultProxy {
    /// Binds the listen address.
    ///
    /// # Errors
    ///
    /// If the address cannot be bound.
    pub fn new(plan: ProxyConfig) -> Result<Self, Error> {
        let listener = StreamListener::open(&ListenAddress::Tcp(plan.listen)).map_err(|error| {
            let text = format!("listen on {}: {error}", plan.listen);
            Error::environment(text).with_hint("port 0 is any that is free: see what is printed")
        })?;
        let sockets = SocketStreamFactory::new(RegionTable::new(1), SocketOptions::default());
        let pool = ThreadPool::new(LOOKUPS_MAX, WAITING_MAX);
        let random = Random::new(plan.seed);
        Ok(Self { plan, listener, pool, sockets, random, links: Vec::new(), count: 0 })
    }

    /// Bound address, with the port that was picked.
    pub fn address(&self) -> &ListenAddress {
        self.listener.address()
    }

    /// Number of open connections.
    pub fn open_connection_count(&self) -> usize {
        self.links.len()
    }

    /// Accepts a connection and forwards pending bytes. Reports connections that begin or end through
    /// `report`. Returns whether anything was done.
    pub fn poll(&mut self, now: Instant, report: &mut dyn FnMut(String)) -> bool {
        let mut moved = self.accept_connection(now, report);
        for link in &mut self.links {
            moved |= link.poll(now, report);
        }
        self.links.retain(|link| !link.is_closed());
        moved
    }

    /// Sleeps until a socket is ready or a timer is due, at most for `longest`.
    ///
    /// # Errors
    ///
    /// If the kernel rejects the epoll operations.
    pub fn wait_for_event(&mut self, now: Instant, longest: Span) -> io::Result<()> {
        let watch = PollSet::new()?;
        watch.add(&self.listener, 0, READABLE)?;
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

    fn accept_connection(&mut self, now: Instant, report: &mut dyn FnMut(String)) -> bool {
        let socket = match self.listener.accept() {
            Ok(Some(socket)) => socket,
            Ok(None) => return false,
            Err(error) => {
                report(format!("take a connection: {error}"));
                return false;
            }
        };
        self.count += 1;
        let (plan, until) = (&self.plan, now.after(CONNECT_MAX));
        let dial = tenmil_linux::socket::ConnectOp::start(&plan.target, &self.pool, now, until);
        let link = dial.map_err(|error| error.to_string()).and_then(|dial| {
            let options = (plan.there.clone(), plan.back.clone());
            let random = self.random.fork();
            ProxiedConnection::new(self.count, socket, dial, &self.sockets, options, random)
        });
        match link {
            Ok(link) => {
                report(format!("connection {}: from {}", self.count, link.client_description()));
                self.links.push(link);
            }
            Err(why) => report(format!("connection {}: {why}", self.count)),
        }
        true
    }
}

impl std::fmt::Debug for FaultProxy {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Proxy")
            .field("plan", &self.plan)
            .field("links", &self.links.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
