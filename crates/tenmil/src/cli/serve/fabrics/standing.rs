//! What is served just now, and how it becomes what a file says.
//!
//! ```text
//!    asked ─ prepare ─▶ doors, devices, subsystems ─ commit ─▶ what stands
//!               │  may be refused: then all that is new is closed again, and nothing has changed;
//!               │  files are made and grown behind the last refusal
//! ```
//!
//! What is the same before and after is not touched: its connections do not notice.

mod disk;
mod leaving;
mod shared;
mod stood;

use std::net::SocketAddr;
use std::sync::Arc;

use block::{Claim, Device, DeviceOptions, Handle, MediumError, Opener};
use control::Devices;
use control::configuration::{self, Configuration, Line};
use ctrl::namespace::CacheVoucher;
use dma::Regions;
use host::Clock;
use host::socket::{Address, Door};
use target::tcp::{Limits, Port, Server, Service, StateDirectory};
use wire::cache::CacheInstance;

use self::leaving::Leaving;
use self::shared::Shared;
use self::stood::subsystem;
pub(super) use self::stood::{Served, Stood};
use crate::Refused;
use crate::cli::serve::open_door;

/// What is served.
pub(super) struct Standing {
    world: World,
    /// None before anything is.
    configuration: Option<Configuration>,
    listeners: Vec<Listener>,
    subsystems: Vec<Stood>,
    leaving: Leaving,
    shared: Shared,
}

/// Where it is served.
pub(super) struct World {
    pub(super) service: Service,
    pub(super) server: Server,
    pub(super) regions: Regions,
    pub(super) clock: Clock,
    /// Where reservations persist, if they do.
    pub(super) state: Option<StateDirectory>,
    /// What can be watched and changed about the devices.
    pub(super) devices: Devices,
}

/// A place where it listens.
#[derive(Clone, Copy)]
struct Listener {
    asked: SocketAddr,
    /// With the port that was picked.
    address: SocketAddr,
    /// The number of the service's port.
    number: u16,
}

/// Why something cannot be served, and where a file asks for it.
#[derive(Debug)]
pub(super) struct Unfit {
    pub(super) refused: Refused,
    pub(super) line: Line,
    pub(super) key: &'static str,
}

/// What came of a configuration that was applied.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// What has changed, a line each.
    pub(super) done: Vec<String>,
    /// What was asked for and is not served, a line each.
    pub(super) failed: Vec<String>,
}

/// All that is new, before anybody sees it.
struct Prepared {
    listeners: Vec<Listener>,
    doors: Vec<(Door, Listener)>,
    subsystems: Vec<Stood>,
}

impl Standing {
    /// Nothing yet.
    pub(super) fn new(world: World) -> Self {
        let (listeners, subsystems) = (Vec::new(), Vec::new());
        let (leaving, shared) = (Leaving::default(), Shared::default());
        Self { world, configuration: None, listeners, subsystems, leaving, shared }
    }

    /// Where it listens.
    pub(super) fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.listeners.iter().map(|listener| listener.address)
    }

    /// Where a subsystem is reached.
    pub(super) fn addresses_of(&self, stood: &Stood) -> impl Iterator<Item = SocketAddr> {
        stood.asked.listeners.iter().filter_map(|at| Some(self.listeners.get(*at)?.address))
    }

    pub(super) fn subsystems(&self) -> &[Stood] {
        &self.subsystems
    }

    /// Serves what is asked for instead, and says what has changed; or nothing has.
    pub(super) fn apply(&mut self, asked: Configuration) -> Result<Changes, Unfit> {
        let prepared = host::file::make_if(|| self.prepare(&asked))?;
        Ok(self.commit(asked, prepared))
    }

    fn prepare(&self, asked: &Configuration) -> Result<Prepared, Unfit> {
        if let Some(before) = &self.configuration {
            check_fixed(before, asked)?;
        }
        // Doors first: who cannot listen need not open a disk.
        let (listeners, doors) = self.prepare_doors(asked)?;
        let subsystems = asked.subsystems.iter().map(|subsystem| self.prepare_one(subsystem));
        let subsystems = subsystems.collect::<Result<_, _>>()?;
        Ok(Prepared { listeners, doors, subsystems })
    }

    #[expect(clippy::type_complexity, reason = "the two belong together in one place only")]
    fn prepare_doors(
        &self,
        asked: &Configuration,
    ) -> Result<(Vec<Listener>, Vec<(Door, Listener)>), Unfit> {
        let (mut listeners, mut doors) = (Vec::<Listener>::new(), Vec::new());
        for one in &asked.listeners {
            // Several may ask for any port of the same address.
            let is_taken = |number| listeners.iter().any(|taken| taken.number == number);
            let before = self.listeners.iter();
            let mut before = before.filter(|it| it.asked == one.address && !is_taken(it.number));
            if let Some(same) = before.next() {
                listeners.push(*same);
                continue;
            }
            let refuse = |refused| Unfit { refused, line: one.line, key: "address" };
            let door = open_door(&Address::Tcp(one.address)).map_err(refuse)?;
            let Address::Tcp(address) = *door.address() else { continue };
            let used =
                |number| is_taken(number) || self.listeners.iter().any(|it| it.number == number);
            let number = (1..u16::MAX).find(|number| !used(*number)).unwrap_or(u16::MAX);
            let listener = Listener { asked: one.address, address, number };
            listeners.push(listener);
            doors.push((door, listener));
        }
        Ok((listeners, doors))
    }

    /// A subsystem with its devices, which are opened unless they are open.
    fn prepare_one(&self, asked: &configuration::Subsystem) -> Result<Stood, Unfit> {
        let before = self.before(&asked.nqn);
        let subsystem = match before.filter(|before| before.is_same(asked)) {
            Some(before) => before.subsystem.clone(),
            None => subsystem(asked)?,
        };
        let mut namespaces: Vec<Served> = Vec::new();
        for namespace in &asked.namespaces {
            let open = before.and_then(|before| before.opened(namespace));
            let served = match open {
                Some(open) => Served { asked: namespace.clone(), ..open.clone() },
                None => self.open(namespace)?,
            };
            let state = self.world.state.as_ref();
            let fresh = open.is_none_or(|open| !served.continues(open));
            let config =
                served.config(state.filter(|_| fresh).map(|state| (state, asked.nqn.as_str())));
            subsystem.check_namespace(&config).map_err(|why| {
                let text = format!("serve {}: {why}", namespace.uri);
                Unfit { refused: Refused::caller(text), line: namespace.line, key: "uri" }
            })?;
            namespaces.push(served);
        }
        Ok(Stood { asked: asked.clone(), subsystem, namespaces })
    }

    fn before(&self, nqn: &str) -> Option<&Stood> {
        self.subsystems.iter().find(|stood| stood.asked.nqn == nqn)
    }

    /// Opens a device and claims it.
    fn open(&self, asked: &configuration::Namespace) -> Result<Served, Unfit> {
        let World { regions, clock, .. } = &self.world;
        let more = [crate::KINDS, &[(configuration::SCHEME, &self.shared)]].concat();
        let opener = Opener { regions, clock: *clock, seed: 1, more: &more };
        let uri = &asked.uri;
        let refuse = |why: MediumError| Unfit {
            refused: Refused::of(why.blame(), format!("serve {uri}: {why}")),
            line: asked.line,
            key: "uri",
        };
        let wanted = if asked.is_read_only { uri.clone().to_read() } else { uri.clone() };
        let opened = opener.open(&wanted).map_err(refuse)?;
        // A channel for each queue of each host: no deeper than the queue, and nobody asks how long
        // each of its requests took.
        let depth = Limits::default().queue_entries.into();
        let options = DeviceOptions { depth, timing: false, ..DeviceOptions::new(*clock, 1) };
        let device = Device::new(&uri.to_string(), opened.medium, options).map_err(refuse)?;
        let claim = if asked.is_read_only { Claim::ReadShared } else { Claim::WriteOnce };
        let descriptor = device.open(claim, "nvme-tcp").map_err(|why| Unfit {
            refused: Refused::of(why.blame(), format!("serve {uri}: {why}")),
            line: asked.line,
            key: "uri",
        })?;
        let (asked, descriptor) = (asked.clone(), Arc::new(descriptor));
        let (description, handles) = (opened.description, opened.handles);
        let identities = opened.identities;
        let cache = host::random_id().map(|id| CacheVoucher::new(CacheInstance(id)));
        Ok(Served { asked, description, device, descriptor, cache, handles, identities })
    }

    /// Makes it so, and says what has changed.
    fn commit(&mut self, asked: Configuration, prepared: Prepared) -> Changes {
        let Prepared { listeners, doors, subsystems } = prepared;
        let mut changes = Changes::default();
        let is_there = |number| listeners.iter().any(|listener| listener.number == number);
        for gone in self.listeners.iter().filter(|listener| !is_there(listener.number)) {
            self.world.server.close(gone.number);
            self.world.service.close_port(gone.number);
            changes.note(format!("listens no more at {}", gone.address));
        }
        for (_, listener) in &doors {
            self.world.service.open_port(listener.number, Port { address: Some(listener.address) });
        }
        for gone in &self.subsystems {
            let stays = subsystems.iter().any(|stood| stood.continues(gone));
            if !stays {
                self.world.service.withdraw(&gone.asked.nqn);
                gone.let_go();
                changes.note(format!("offers {} no more", gone.asked.nqn));
            }
        }
        for stood in &subsystems {
            match self.subsystems.iter().find(|before| stood.continues(before)) {
                Some(before) => stood.replace(before, &listeners, &self.world, &mut changes),
                None => stood.offer(&listeners, &self.world, &mut changes),
            }
        }
        if self.configuration.as_ref().is_none_or(|before| before.referrals != asked.referrals) {
            self.world.service.refer_to(asked.referrals.clone());
        }
        // Who comes in finds everything there.
        for (door, listener) in doors {
            match self.world.server.open(door, listener.number) {
                Ok(()) => changes.note(format!("listens at {}", listener.address)),
                Err(error) => {
                    changes.fail(format!("cannot listen at {}: {error}", listener.address))
                }
            }
        }
        let served = subsystems.iter().flat_map(|stood| &stood.namespaces);
        let mut hands: Vec<Handle> = Vec::new();
        for hand in served.flat_map(|one| &one.handles) {
            // Several may stand on one device.
            if !hands.contains(hand) {
                hands.push(hand.clone());
            }
        }
        self.world.devices.replace(hands);
        for gone in self.subsystems.iter().flat_map(|stood| &stood.namespaces) {
            let mut now = subsystems.iter().flat_map(|stood| &stood.namespaces);
            if !now.any(|served| Arc::ptr_eq(&served.descriptor, &gone.descriptor)) {
                self.leaving.keep(gone.device.clone());
            }
        }
        (self.configuration, self.listeners, self.subsystems) =
            (Some(asked), listeners, subsystems);
        changes
    }

    /// Lets nobody in any more. What was served is there for as long as what is returned.
    pub(super) fn close(self) -> impl Send {
        let Self { world, subsystems, leaving, .. } = self;
        let World { service, server, regions, state, .. } = world;
        drop(server);
        // The last of them waits for what is still to be written.
        (subsystems, leaving, service, regions, state)
    }

    /// Passes on what has happened to devices, and closes those that nobody has any more.
    pub(super) fn hear(&mut self) {
        self.leaving.close();
        for stood in &self.subsystems {
            stood.namespaces.iter().for_each(|served| served.hear(&stood.subsystem));
        }
    }
}

impl Changes {
    fn note(&mut self, text: String) {
        self.done.push(text);
    }

    fn fail(&mut self, text: String) {
        self.failed.push(text);
    }

    /// Refuses to begin with less than what was asked for.
    pub(super) fn all(self) -> Result<(), Refused> {
        match self.failed.is_empty() {
            true => Ok(()),
            false => Err(Refused::machine(format!("serve: {}", self.failed.join("; ")))),
        }
    }
}

impl Unfit {
    /// It as people read it, if a file asks for it.
    pub(super) fn in_file(self, path: &std::path::Path) -> Refused {
        let Self { refused, line: Line(line), key } = self;
        let place = match line {
            0 => String::new(),
            line => format!(" line {line}, `{key}`:"),
        };
        let text = format!("{}:{place} {}", path.display(), refused.text);
        Refused { text, ..refused }
    }
}

impl From<host::file::FileError> for Unfit {
    /// It names the file that cannot be made.
    fn from(error: host::file::FileError) -> Self {
        Self { refused: error.into(), line: Line::default(), key: "uri" }
    }
}

/// Whether what is given at start is as it was.
fn check_fixed(before: &Configuration, asked: &Configuration) -> Result<(), Unfit> {
    super::limits::check_same(before, asked)?;
    let refuse = |(found, expected): (String, String), line, key, what: &str| {
        let text = format!("it is {found}, expected {expected} as at start");
        let hint = format!("{what} is taken once: start the process again for another");
        Err(Unfit { refused: Refused::caller(text).with_hint(hint), line, key })
    };
    if before.memory_bytes != asked.memory_bytes {
        let shown = |bytes: Option<u64>| {
            bytes.map_or_else(|| "the usual".to_owned(), |bytes| format!("{bytes} bytes"))
        };
        let both = (shown(asked.memory_bytes), shown(before.memory_bytes));
        return refuse(both, asked.memory_line, "memory", "memory");
    }
    if before.state != asked.state {
        let shown = |path: Option<&std::path::Path>| {
            path.map_or_else(|| "none".to_owned(), |path| path.display().to_string())
        };
        let both = (shown(asked.state.as_deref()), shown(before.state.as_deref()));
        return refuse(both, asked.state_line, "state", "the state directory");
    }
    Ok(())
}
