//! One run: members, messages and faults in steps of true time.

use std::collections::{BTreeMap, BTreeSet};

use tenmil_base::{Instant, Random, Span};

use super::media::Media;
use super::{RunOutcome, TAKEOVER_MAX};
use crate::member::{
    Action, GroupPhase, InjectedBug, Member, MemberConfig, MemberState, OpenedGroup, OperationId,
    ProposalOutcome,
};
use crate::records::CONFIGURATION_KEY;
use crate::store::{StoreOperation, StoreReply};
use crate::{LeaseTiming, MemoryStore};

/// Members, by index.
const MEMBERS: usize = 3;
const GROUPS: u32 = 4;
const STEP: Span = Span::from_ms(5);
/// Time in which faults happen, and the time after it in which none do.
const FAULTY: Span = Span::from_secs(60);
const CALM: Span = Span::from_secs(12);
/// Time after which an operation without a reply is unknown.
const REPLY_TIMEOUT: Span = Span::from_ms(500);

struct Run {
    now: Instant,
    random: Random,
    store: MemoryStore,
    media: Media,
    members: Vec<SimMember>,
    messages: Vec<Message>,
    timing: LeaseTiming,
    bug: Option<InjectedBug>,
    /// Whether media can be fenced. Otherwise a write takes less than the margin.
    has_fences: bool,
    store_revision: u64,
    last_fault: Instant,
    served_at: BTreeMap<u32, Instant>,
    longest_gap: Span,
    /// Configuration of the store.
    configuration: String,
    /// Changes of the configuration that the store has not had, with the configuration that each changes.
    proposed: BTreeMap<String, String>,
    seeds: u64,
}

struct SimMember {
    name: String,
    member: Option<Member>,
    /// Clock: true time times a rate, plus an offset.
    rate_permille: u64,
    offset: Span,
    paused_until: Instant,
    cut_off_until: Instant,
    /// Actions under way, and when they are done.
    actions: Vec<(Instant, Action)>,
    /// Groups that are open, with the name of this owner at the medium and its term.
    open: BTreeMap<u32, (String, u64)>,
    active: BTreeSet<u32>,
    opened_count: u64,
    /// Configuration with which the process is started.
    configuration: String,
    /// Change of the configuration under way, whose outcome is not known.
    proposal: Option<String>,
    /// A writer was paused between its check of the lease and its write.
    interrupted: Option<(u32, String, u64)>,
}

struct Message {
    at: Instant,
    member: usize,
    /// Start of the process that has sent it.
    seed: u64,
    id: OperationId,
    content: Content,
}

enum Content {
    Request(StoreOperation),
    Reply(StoreReply),
}

/// Runs a seed, with a bug or without.
#[must_use]
pub fn run_seed(seed: u64, bug: Option<InjectedBug>) -> RunOutcome {
    let mut run = Run::new(seed, bug);
    let end = run.now.after(FAULTY).after(CALM);
    let mut failure = None;
    while failure.is_none() && run.now < end {
        failure = run.advance().err();
    }
    let failure = failure.or_else(|| run.check_agreement().err());
    RunOutcome {
        writes: run.media.writes(),
        ownerships: run.media.ownerships(),
        longest_gap: run.longest_gap,
        failure,
    }
}

impl Run {
    fn new(seed: u64, bug: Option<InjectedBug>) -> Self {
        let mut random = Random::new(seed);
        let mut run = Self {
            now: Instant::default(),
            has_fences: random.chance(1, 2),
            store: MemoryStore::default(),
            media: Media::default(),
            members: Vec::new(),
            messages: Vec::new(),
            timing: LeaseTiming::default(),
            bug,
            store_revision: 0,
            last_fault: Instant::default(),
            served_at: (1..=GROUPS).map(|group| (group, Instant::default())).collect(),
            longest_gap: Span::default(),
            configuration: String::new(),
            proposed: BTreeMap::new(),
            seeds: seed,
            random,
        };
        for index in 0..MEMBERS {
            let drift = u64::from(run.timing.drift_permille);
            run.members.push(SimMember {
                name: format!("gateway-{index}"),
                member: None,
                // The store's clock is true time, so members differ from it by the drift at most.
                rate_permille: 1000 - drift + run.random.below(2 * drift + 1),
                offset: Span::from_secs(run.random.below(1_000_000)),
                paused_until: Instant::default(),
                cut_off_until: Instant::default(),
                actions: Vec::new(),
                open: BTreeMap::new(),
                active: BTreeSet::new(),
                opened_count: 0,
                configuration: String::new(),
                proposal: None,
                interrupted: None,
            });
            run.start_member(index);
        }
        run
    }

    fn advance(&mut self) -> Result<(), String> {
        self.now = self.now.after(STEP);
        if self.now < Instant::default().after(FAULTY) {
            self.inject_faults();
        }
        self.deliver_messages();
        let revision = self.store.end_leases(self.now);
        let has_changed = revision != self.store_revision;
        self.store_revision = revision;
        self.check_configuration(has_changed)?;
        for index in 0..MEMBERS {
            if self.members[index].paused_until <= self.now {
                self.step_member(index, has_changed);
            }
        }
        self.media.execute(self.now)?;
        self.check_service()
    }

    fn inject_faults(&mut self) {
        if !self.random.chance(1, 600) {
            return;
        }
        let index = usize::try_from(self.random.below(MEMBERS as u64)).unwrap_or(0);
        let time = Span::from_ms(100 + self.random.below(6_000));
        let until = self.now.after(time);
        let seed = self.random.next_u64();
        let now = self.now;
        let local = self.members[index].local_time(now);
        let member = &mut self.members[index];
        match seed % 8 {
            0 | 1 => {
                member.member = None;
                member.actions.clear();
                member.open.clear();
                member.active.clear();
                member.interrupted = None;
                // It is started again after that.
                member.paused_until = until;
            }
            2 | 3 => member.paused_until = member.paused_until.max(until),
            4 => member.cut_off_until = until,
            5 => member.member.iter_mut().for_each(|member| member.drain(local)),
            6 => member.member.iter_mut().for_each(|member| member.rebalance(local)),
            _ => {
                // The store is unreachable for all.
                self.members.iter_mut().for_each(|member| member.cut_off_until = until);
            }
        }
        self.last_fault = self.last_fault.max(until);
    }

    fn start_member(&mut self, index: usize) {
        self.seeds = self.seeds.wrapping_add(1);
        let config = MemberConfig {
            name: self.members[index].name.clone(),
            addresses: vec![format!("192.0.2.{index}:4420")],
            groups: (1..=GROUPS).collect(),
            configuration: self.members[index].configuration.clone(),
            timing: self.timing,
            injected_bug: self.bug,
        };
        self.members[index].proposal = None;
        self.members[index].member = Some(Member::new(config, self.seeds));
    }

    fn step_member(&mut self, index: usize, has_changed: bool) {
        if self.members[index].member.is_none() {
            self.start_member(index);
        }
        self.finish_interrupted_write(index);
        let now = self.now;
        let sim = &mut self.members[index];
        let local = sim.local_time(now);
        let is_reachable = sim.cut_off_until <= now;
        let Some(member) = &mut sim.member else { return };
        if has_changed && is_reachable {
            member.handle_change(local);
        }
        member.step(local);
        self.change_configuration(index, local);
        self.write(index, local);
        if self.members[index].interrupted.is_some() {
            return;
        }
        self.finish_actions(index, local);
        self.take_outputs(index);
    }

    /// Proposes a change of the configuration now and then, as a client of the gateway does.
    fn change_configuration(&mut self, index: usize, local: Instant) {
        let number = self.proposed.len() as u64 + self.now.ns;
        let is_due = self.now < Instant::default().after(FAULTY) && self.random.chance(1, 2_000);
        let sim = &mut self.members[index];
        let Some(member) = &mut sim.member else { return };
        match member.take_proposal_outcome() {
            Some(ProposalOutcome::Adopted) => {
                sim.configuration = sim.proposal.take().unwrap_or_default();
            }
            Some(_) => sim.proposal = None,
            None => {}
        }
        if let Some(other) = member.differing_configuration() {
            // Somebody corrects the file and starts the process again.
            sim.configuration = other.to_owned();
            sim.member = None;
            sim.actions.clear();
            return;
        }
        if is_due && sim.proposal.is_none() {
            let text = format!("{index} at {number}");
            sim.proposal = Some(text.clone());
            member.propose_configuration(local, text.clone());
            self.proposed.insert(text, sim.configuration.clone());
        }
    }

    /// Checks that no change of the configuration is lost: each was made to the one before it.
    fn check_configuration(&mut self, has_changed: bool) -> Result<(), String> {
        if !has_changed {
            return Ok(());
        }
        let StoreReply::Snapshot(map) = self.store.execute_at(self.now, &StoreOperation::Read)
        else {
            return Ok(());
        };
        let Some(entry) = map.entries.get(CONFIGURATION_KEY) else { return Ok(()) };
        let before = std::mem::replace(&mut self.configuration, entry.value.clone());
        match self.proposed.remove(&self.configuration) {
            Some(base) if base != before => {
                let now = &self.configuration;
                Err(format!("configuration `{now}` changes `{base}`, and the store had `{before}`"))
            }
            _ => Ok(()),
        }
    }

    /// Checks that all members have the configuration of the store.
    fn check_agreement(&self) -> Result<(), String> {
        match self.members.iter().find(|sim| sim.configuration != self.configuration) {
            None => Ok(()),
            Some(sim) => Err(format!(
                "{} has the configuration `{}`, and the store `{}`",
                sim.name, sim.configuration, self.configuration
            )),
        }
    }

    /// A paused thread goes on with the write before anything else: only a fence of the medium can stop it.
    fn finish_interrupted_write(&mut self, index: usize) {
        if let Some((group, owner, term)) = self.members[index].interrupted.take() {
            self.media.begin_write(group, self.now, &owner, term);
        }
    }

    /// Writes to each group that is served here.
    fn write(&mut self, index: usize, local: Instant) {
        let sim = &self.members[index];
        let Some(member) = &sim.member else { return };
        let serves = local < member.serving_until();
        let open: Vec<(u32, (String, u64))> = sim
            .active
            .iter()
            .filter(|_| serves)
            .filter_map(|group| Some((*group, sim.open.get(group)?.clone())))
            .collect();
        for (group, (owner, term)) in open {
            if !self.random.chance(1, 4) {
                continue;
            }
            if self.has_fences && self.random.chance(1, 4_000) {
                let until = self.now.after(Span::from_ms(3_000 + self.random.below(4_000)));
                self.members[index].paused_until = until;
                self.members[index].interrupted = Some((group, owner, term));
                self.last_fault = self.last_fault.max(until);
                return;
            }
            // Without a fence, what is on its way must arrive within the margin.
            let slowest =
                if self.has_fences { 6_000 } else { self.timing.margin.ns / 1_000_000 - 10 };
            let is_slow = self.random.chance(1, 50);
            let time = 1 + self.random.below(if is_slow { slowest } else { 10 });
            let arrives = self.now.after(Span::from_ms(time));
            // A clean close waits for it: a medium that is slow is a fault.
            if time > 1_000 {
                self.last_fault = self.last_fault.max(arrives);
            }
            self.media.begin_write(group, arrives, &owner, term);
        }
    }

    fn take_outputs(&mut self, index: usize) {
        loop {
            let sim = &mut self.members[index];
            let Some(member) = &mut sim.member else { return };
            let operation = member.next_lease_operation().or_else(|| member.next_map_operation());
            let Some((id, operation)) = operation else { break };
            let longest = if self.random.chance(1, 20) { 200 } else { 10 };
            let delay = 1 + self.random.below(longest);
            let at = self.now.after(Span::from_ms(delay));
            self.messages.push(Message {
                at,
                member: index,
                seed: self.seed_of(index),
                id,
                content: Content::Request(operation),
            });
        }
        while let Some(action) = self.members[index].member.as_mut().and_then(Member::next_action) {
            let sim = &mut self.members[index];
            let longest = match action {
                Action::Fence { .. } | Action::Configure { .. } => 200,
                Action::Open { .. } => 100,
                Action::Activate { group } => {
                    sim.active.insert(group);
                    continue;
                }
                Action::Close { group } => {
                    sim.active.remove(&group);
                    30
                }
            };
            let at = self.now.after(Span::from_ms(self.random.below(longest)));
            sim.actions.push((at, action));
        }
    }

    /// Start of the process that has this index now.
    fn seed_of(&self, index: usize) -> u64 {
        self.members[index].member.as_ref().map_or(0, Member::start_number)
    }

    fn finish_actions(&mut self, index: usize, local: Instant) {
        let now = self.now;
        let has_fences = self.has_fences;
        let Self { members, media, random, last_fault, .. } = self;
        let sim = &mut members[index];
        let Some(member) = &mut sim.member else { return };
        let (mut done, mut rest) = (Vec::new(), Vec::new());
        for (at, action) in sim.actions.drain(..) {
            let is_done = match &action {
                // A clean close waits for the writes under way; the medium ends those that were fenced.
                Action::Close { group } => {
                    let open = sim.open.get(group);
                    at <= now && open.is_none_or(|(name, _)| media.is_idle(*group, name))
                }
                _ => at <= now,
            };
            if is_done { done.push(action) } else { rest.push((at, action)) }
        }
        sim.actions = rest;
        for action in done {
            match action {
                Action::Fence { group, names } => {
                    media.fence(group, &names);
                    member.handle_fenced(local, group, true);
                }
                Action::Open { group } => {
                    let term = member.status().groups[&group].0.term;
                    sim.opened_count += 1;
                    let name = format!("{}/{}/{term}", sim.name, sim.opened_count);
                    if random.chance(1, 30) {
                        *last_fault = (*last_fault).max(now);
                        member.handle_opened(local, group, None);
                    } else {
                        sim.open.insert(group, (name.clone(), term));
                        let names = if has_fences { vec![name] } else { Vec::new() };
                        let opened = OpenedGroup { names, ..OpenedGroup::default() };
                        member.handle_opened(local, group, Some(opened));
                    }
                }
                Action::Configure { configuration } => {
                    sim.configuration.clone_from(&configuration);
                    member.handle_configured(local, configuration, true);
                }
                // Done when it was taken.
                Action::Activate { .. } => {}
                Action::Close { group } => {
                    sim.open.remove(&group);
                    member.handle_closed(local, group);
                }
            }
        }
    }

    fn deliver_messages(&mut self) {
        let now = self.now;
        let (mut due, rest): (Vec<_>, Vec<_>) =
            self.messages.drain(..).partition(|message| message.at <= now);
        self.messages = rest;
        due.sort_by_key(|message| (message.at, message.member, message.id));
        let is_faulty = now < Instant::default().after(FAULTY);
        for message in due {
            let Message { member: index, seed, id, content, .. } = message;
            let is_reachable = self.members[index].cut_off_until <= now;
            let is_lost = !is_reachable || (is_faulty && self.random.chance(1, 300));
            if is_lost {
                self.last_fault = self.last_fault.max(now.after(REPLY_TIMEOUT));
            }
            match content {
                Content::Request(_) if is_lost => self.reply_later(index, seed, id, unknown()),
                Content::Request(operation) => {
                    let reply = self.store.execute_at(now, &operation);
                    // It was executed, and the member does not learn it.
                    let is_lost = is_faulty && self.random.chance(1, 300);
                    if is_lost {
                        self.last_fault = self.last_fault.max(now.after(REPLY_TIMEOUT));
                    }
                    let reply = if is_lost { unknown() } else { reply };
                    self.reply_later(index, seed, id, reply);
                }
                Content::Reply(reply) => {
                    let is_paused = self.members[index].paused_until > now;
                    if is_paused {
                        let content = Content::Reply(reply);
                        let at = self.members[index].paused_until.after(STEP);
                        self.messages.push(Message { at, member: index, seed, id, content });
                        continue;
                    }
                    let local = self.members[index].local_time(now);
                    let is_same = self.seed_of(index) == seed;
                    if let Some(member) = self.members[index].member.as_mut().filter(|_| is_same) {
                        member.handle_reply(local, id, reply);
                    }
                }
            }
        }
    }

    fn reply_later(&mut self, index: usize, seed: u64, id: OperationId, reply: StoreReply) {
        let delay = match reply {
            StoreReply::Unknown(_) => REPLY_TIMEOUT,
            _ => Span::from_ms(1 + self.random.below(10)),
        };
        let at = self.now.after(delay);
        self.messages.push(Message { at, member: index, seed, id, content: Content::Reply(reply) });
    }

    /// Checks that at most one member serves each group, and that each is served again in time.
    fn check_service(&mut self) -> Result<(), String> {
        for group in 1..=GROUPS {
            let serving: Vec<&str> = self
                .members
                .iter()
                .filter(|sim| sim.paused_until <= self.now && sim.serves(self.now, group))
                .map(|sim| sim.name.as_str())
                .collect();
            if serving.len() > 1 {
                return Err(format!("group {group} is served by {}", serving.join(" and ")));
            }
            let served_at = self.served_at.entry(group).or_default();
            if !serving.is_empty() {
                *served_at = self.now;
            }
            let gap = self.now.since((*served_at).max(self.last_fault));
            self.longest_gap = self.longest_gap.max(gap);
            if gap > TAKEOVER_MAX {
                let phases: Vec<String> = self.members.iter().map(SimMember::describe).collect();
                let phases = phases.join("; ");
                return Err(format!("group {group} is not served for {gap}: {phases}"));
            }
        }
        Ok(())
    }
}

impl SimMember {
    fn local_time(&self, now: Instant) -> Instant {
        Instant { ns: now.ns / 1000 * self.rate_permille }.after(self.offset)
    }

    fn serves(&self, now: Instant, group: u32) -> bool {
        let Some(member) = &self.member else { return false };
        self.active.contains(&group) && self.local_time(now) < member.serving_until()
    }

    fn describe(&self) -> String {
        let Some(member) = &self.member else { return format!("{} is down", self.name) };
        let status = member.status();
        let phases: Vec<GroupPhase> = status.phases.into_values().collect();
        let is_member = status.state == MemberState::Joined;
        format!("{}: {:?} {is_member} {phases:?}", self.name, status.state)
    }
}

fn unknown() -> StoreReply {
    StoreReply::Unknown("no reply".to_owned())
}
