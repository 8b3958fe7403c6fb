//! Edits of the text of a configuration: create, set and delete an object.
//!
//! ```text
//!   text ─ toml_edit ─ edit ─ text ─ TargetConfig::parse ─ apply
//! ```
//!
//! Comments, order and layout of everything else stay. The result is not checked here, but by
//! [`TargetConfig::parse`](super::TargetConfig::parse), as a text that a person has edited.

mod array_layout;
mod limits;
mod removed_table;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;

use tenmil_wire::nqn;
use toml_edit::{Array, ArrayOfTables, DocumentMut, InlineTable, Item, Table, TableLike, Value};

use self::array_layout::{push_in_layout, remove_with_comment};
use self::removed_table::remove_table_with_comment;
use super::config_checker::NSID_MAX;
use crate::arguments::{Argument, Arguments};
use crate::error::{ErrorCode, RpcError, join_alternatives, quote_untrusted};
use crate::method::MethodKind;

/// Kind of an object that can be created, changed and deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigObject {
    /// `[[subsystem]]`, by its NQN.
    Subsystem,
    /// `[[subsystem.namespace]]`, by subsystem and NSID.
    Namespace,
    /// Entry of `allowed-hosts` of a subsystem, by subsystem and host NQN.
    Host,
    /// `[[listener]]`, by its address.
    Listener,
    /// `[[export]]`, by its name.
    Export,
    /// `[[subsystem.path]]`, by subsystem, listener and ANA group.
    AnaState,
    /// `limits` of `[[subsystem]]`, by its NQN.
    SubsystemLimits,
    /// `limits` of `[[subsystem.namespace]]`, by subsystem and NSID.
    NamespaceLimits,
    /// `limits` of an entry of `allowed-hosts`, by subsystem and host NQN; or `host-limits`.
    HostLimits,
    /// `limits` of `[[export]]`, by its name.
    ExportLimits,
}

/// Edit of one object.
#[derive(Clone, Debug)]
pub struct ConfigEdit {
    /// Create, set or delete.
    pub kind: MethodKind,
    /// What is edited.
    pub object: ConfigObject,
    /// Validated arguments of the method.
    pub arguments: Arguments,
}

type EditResult<T> = Result<T, RpcError>;

impl ConfigObject {
    /// Name in methods and commands.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Subsystem => "subsystem",
            Self::Namespace => "namespace",
            Self::Host => "host",
            Self::Listener => "listener",
            Self::Export => "export",
            Self::AnaState => "ana_state",
            Self::SubsystemLimits => "subsystem_limits",
            Self::NamespaceLimits => "namespace_limits",
            Self::HostLimits => "host_limits",
            Self::ExportLimits => "export_limits",
        }
    }

    /// Parameters that name an object. All others are keys of its table.
    const fn identifying(self) -> &'static [&'static str] {
        match self {
            Self::Subsystem => &["nqn"],
            Self::Namespace => &["subsystem", "nsid"],
            Self::Host => &["subsystem", "host"],
            Self::Listener => &["address"],
            Self::Export => &["name"],
            Self::AnaState => &["subsystem", "listener", "ana_group"],
            Self::SubsystemLimits => &["subsystem"],
            Self::NamespaceLimits => &["subsystem", "namespace"],
            Self::HostLimits => &["subsystem", "host"],
            Self::ExportLimits => &["name"],
        }
    }
}

impl ConfigEdit {
    /// Text of the configuration after the edit. `bound` are the addresses at which the listeners of the
    /// text listen, in its order: a listener with port 0 is also found by its bound address.
    ///
    /// # Errors
    ///
    /// If the object exists already, or does not exist, or another one needs it.
    pub fn edit_text(&self, text: &str, bound: &[SocketAddr]) -> EditResult<String> {
        let mut document = text.parse::<DocumentMut>().map_err(|error| {
            let text = error.message().trim().replace('\n', ", ");
            self.refuse(ErrorCode::Failed, format!("the configuration is no TOML: {text}"))
        })?;
        // In a file of comments alone these stand behind everything, also behind what is new.
        let comments = document.trailing().as_str().unwrap_or_default().to_owned();
        let has_only_comments = document.is_empty();
        if has_only_comments {
            document.set_trailing("");
        }
        match (self.object, self.kind) {
            (ConfigObject::Subsystem, _) => self.edit_subsystem(&mut document, bound),
            (ConfigObject::Namespace, _) => self.edit_namespace(&mut document),
            (ConfigObject::Host, _) => self.edit_host(&mut document),
            (ConfigObject::Listener, _) => self.edit_listener(&mut document, bound),
            (ConfigObject::Export, _) => self.edit_export(&mut document),
            (ConfigObject::AnaState, _) => self.set_ana_state(&mut document, bound),
            (
                ConfigObject::SubsystemLimits
                | ConfigObject::NamespaceLimits
                | ConfigObject::HostLimits
                | ConfigObject::ExportLimits,
                _,
            ) => self.edit_limits(&mut document),
        }?;
        let text = document.to_string();
        Ok(match has_only_comments {
            true if comments.is_empty() => text.trim_start().to_owned(),
            true => comments + &text,
            false => text,
        })
    }

    /// What is done, as in `create subsystem`, for messages.
    pub fn action(&self) -> String {
        format!("{} {}", self.kind.name(), self.object.name())
    }

    fn text(&self, parameter: &str) -> &str {
        self.arguments.text(parameter).unwrap_or_default()
    }

    fn refuse(&self, code: ErrorCode, problem: impl AsRef<str>) -> RpcError {
        RpcError::usage(code, format!("{}: {}", self.action(), problem.as_ref()))
    }

    fn exists(&self, what: &str, expected: &str) -> RpcError {
        let problem = format!("{} exists already, expected {expected}", quote_untrusted(what));
        self.refuse(ErrorCode::Failed, problem)
    }

    fn not_found(&self, what: &str, known: &[String]) -> RpcError {
        let known: Vec<&str> = known.iter().map(String::as_str).collect();
        let problem =
            format!("no {}, expected {}", quote_untrusted(what), join_alternatives(&known));
        self.refuse(ErrorCode::NotFound, problem)
    }

    fn edit_subsystem(&self, document: &mut DocumentMut, bound: &[SocketAddr]) -> EditResult<()> {
        let name = self.text("nqn");
        let listeners = self.listeners_as_configured(document, bound)?;
        if name == nqn::DISCOVERY && self.kind == MethodKind::Set {
            return self.change_discovery(document);
        }
        let found = position_of(tables(document, "subsystem"), "nqn", name);
        match (self.kind, found) {
            (MethodKind::Create, Some(_)) => Err(self.exists(name, "another NQN")),
            (MethodKind::Create, None) => {
                let mut table = new_table();
                table.insert("nqn", name.into());
                self.set_values(&mut table);
                if let Some(listeners) = listeners {
                    set_value(&mut table, "listeners", Value::Array(listeners));
                }
                // Without a list the file means any host at a loopback listener: an empty list is safe
                // at every listener, and hosts can be added to it.
                if self.arguments.boolean("allow_any_host") != Some(true) {
                    table.remove("allow-any-host");
                    table.entry("allowed-hosts").or_insert_with(|| Array::new().into());
                }
                array_of_tables(document, "subsystem").push(table);
                Ok(())
            }
            (_, None) => Err(self.not_found(name, &names(tables(document, "subsystem"), "nqn"))),
            (MethodKind::Delete, Some(at)) => {
                remove_table_with_comment(document, &["subsystem"], &[at]);
                Ok(())
            }
            (_, Some(at)) => {
                let table = table_at(document, "subsystem", at);
                self.change_values(table);
                if let Some(listeners) = listeners {
                    set_value(table, "listeners", Value::Array(listeners));
                }
                self.settle_allowed_hosts(name, table)
            }
        }
    }

    /// Changes what the discovery service demands of its hosts.
    fn change_discovery(&self, document: &mut DocumentMut) -> EditResult<()> {
        let is_other = |name: &&str| matches!(*name, "allow_any_host" | "listeners");
        if let Some(name) = self.arguments.iter().map(|(name, _)| name).find(is_other) {
            let problem = format!(
                "`{name}` of the discovery service, expected authentication, secure_channel or \
                 allowed_networks"
            );
            return Err(self.refuse(ErrorCode::BadValue, problem));
        }
        let discovery = document.entry("discovery").or_insert_with(|| Item::Table(new_table()));
        let Some(table) = discovery.as_table_like_mut() else {
            return Err(self.refuse(ErrorCode::Failed, "`discovery` is no table, expected one"));
        };
        self.change_values(table);
        if table.is_empty() {
            document.remove("discovery");
        }
        Ok(())
    }

    /// The listeners that are given, by the addresses that the text has for them.
    fn listeners_as_configured(
        &self,
        document: &DocumentMut,
        bound: &[SocketAddr],
    ) -> EditResult<Option<Array>> {
        let given = self.arguments.texts("listeners");
        let all = names(tables(document, "listener"), "address");
        let mut configured = Array::new();
        for address in given {
            let found = find_listener(document, address, bound).and_then(|at| all.get(at));
            let Some(name) = found else {
                return Err(self.not_found(address, &known_listeners(document, bound)));
            };
            configured.push(name.as_str());
        }
        Ok((!given.is_empty()).then_some(configured))
    }

    /// Makes `allow-any-host` and `allowed-hosts` agree after one of them was set.
    fn settle_allowed_hosts(&self, nqn: &str, table: &mut Table) -> EditResult<()> {
        let Some(is_open) = self.arguments.boolean("allow_any_host") else { return Ok(()) };
        let listed = table.get("allowed-hosts").and_then(Item::as_array).map(Array::len);
        match (is_open, listed) {
            (true, Some(0)) => {
                table.remove("allowed-hosts");
            }
            (true, Some(_)) => {
                let problem = format!("{nqn} has hosts, expected none of them or no other host");
                let hint = format!("delete them with `tenmil host delete {nqn} HOST`");
                return Err(self.refuse(ErrorCode::Failed, problem).with_hint(hint));
            }
            (false, None) => {
                table.remove("allow-any-host");
                table.insert("allowed-hosts", Array::new().into());
            }
            (false, Some(_)) => {
                table.remove("allow-any-host");
            }
            (true, None) => {}
        }
        Ok(())
    }

    fn edit_namespace(&self, document: &mut DocumentMut) -> EditResult<()> {
        let subsystem = self.find_subsystem(document)?;
        let table = table_at(document, "subsystem", subsystem);
        let nsids = namespace_ids(table);
        let given = self.arguments.integer("nsid");
        let free = || (1..=NSID_MAX).map(u64::from).find(|nsid| !nsids.contains(nsid));
        if self.kind == MethodKind::Create {
            let nsid = given.or_else(free).ok_or_else(|| {
                let problem = format!("{NSID_MAX} namespaces exist, expected fewer");
                self.refuse(ErrorCode::Failed, problem)
            })?;
            if nsids.contains(&nsid) {
                return Err(self.exists(&nsid.to_string(), "another NSID"));
            }
            let mut new = new_table();
            new.insert("uri", self.text("uri").into());
            new.insert("nsid", integer(nsid).into());
            self.set_values(&mut new);
            array_of_tables(table, "namespace").push(new);
            return Ok(());
        }
        let nsid = given.unwrap_or_default();
        let Some(at) = nsids.iter().position(|other| *other == nsid) else {
            let known: Vec<_> = nsids.iter().map(u64::to_string).collect();
            return Err(self.not_found(&nsid.to_string(), &known));
        };
        if self.kind == MethodKind::Set {
            self.change_values(table_at(table, "namespace", at));
            return Ok(());
        }
        remove_table_with_comment(document, &["subsystem", "namespace"], &[subsystem, at]);
        // Those without an NSID of their own keep the one that they had.
        let table = table_at(document, "subsystem", subsystem);
        let kept: Vec<u64> = nsids.iter().copied().filter(|other| *other != nsid).collect();
        for (at, nsid) in kept.iter().enumerate() {
            if namespace_ids(table).get(at) != Some(nsid) {
                table_at(table, "namespace", at).insert("nsid", integer(*nsid).into());
            }
        }
        Ok(())
    }

    fn edit_host(&self, document: &mut DocumentMut) -> EditResult<()> {
        let (name, host) = (self.text("subsystem").to_owned(), self.text("host"));
        if name == nqn::DISCOVERY {
            return self.edit_host_of_discovery(document);
        }
        let subsystem = self.find_subsystem(document)?;
        let table = table_at(document, "subsystem", subsystem);
        if !table.contains_key("allowed-hosts") {
            let problem = format!("any host may connect to {name}, expected a list of hosts");
            let hint = format!("tenmil subsystem set {name} --allow-any-host=false");
            return Err(self.refuse(ErrorCode::Failed, problem).with_hint(hint));
        }
        self.edit_allowed_hosts(table)?;
        match self.kind {
            MethodKind::Delete => self.remove_host_of_namespaces(host, table),
            _ => Ok(()),
        }
    }

    /// Edits the hosts of the discovery service. Without a list of its own it has the keys of all subsystems, so
    /// the last host takes the list with it.
    fn edit_host_of_discovery(&self, document: &mut DocumentMut) -> EditResult<()> {
        let discovery = document.entry("discovery").or_insert_with(|| Item::Table(new_table()));
        let Some(table) = discovery.as_table_like_mut() else {
            return Err(self.refuse(ErrorCode::Failed, "`discovery` is no table, expected one"));
        };
        if !table.contains_key("allowed-hosts") {
            table.insert("allowed-hosts", Array::new().into());
        }
        self.edit_allowed_hosts(table)?;
        if table.get("allowed-hosts").and_then(Item::as_array).is_some_and(Array::is_empty) {
            table.remove("allowed-hosts");
        }
        if table.is_empty() {
            document.remove("discovery");
        }
        Ok(())
    }

    /// Edits the list `allowed-hosts` of a table.
    fn edit_allowed_hosts(&self, table: &mut dyn TableLike) -> EditResult<()> {
        let host = self.text("host");
        let Some(hosts) = table.get_mut("allowed-hosts").and_then(Item::as_array_mut) else {
            return Err(self.refuse(ErrorCode::Failed, "`allowed-hosts` is no list, expected one"));
        };
        let found = hosts.iter().position(|entry| host_nqn(entry) == Some(host));
        match (self.kind, found) {
            (MethodKind::Create, Some(_)) => Err(self.exists(host, "another host")),
            (MethodKind::Create, None) => {
                let mut entry = InlineTable::new();
                self.set_host_values(&mut entry);
                push_in_layout(hosts, host_entry(host, entry));
                Ok(())
            }
            (_, None) => {
                let known: Vec<_> = hosts.iter().filter_map(host_nqn).map(str::to_owned).collect();
                Err(self.not_found(host, &known))
            }
            (MethodKind::Delete, Some(at)) => {
                remove_with_comment(hosts, at);
                Ok(())
            }
            (_, Some(at)) => {
                let Some(value) = hosts.get_mut(at) else { return Ok(()) };
                let mut entry = value.as_inline_table().cloned().unwrap_or_default();
                entry.remove("nqn");
                self.set_host_values(&mut entry);
                let mut new = host_entry(host, entry);
                new.decor_mut().clone_from(value.decor());
                *value = new;
                Ok(())
            }
        }
    }

    /// Removes a host from the lists of the namespaces, which name hosts of the subsystem.
    fn remove_host_of_namespaces(&self, host: &str, subsystem: &mut Table) -> EditResult<()> {
        let nsids = namespace_ids(subsystem);
        for (at, nsid) in nsids.into_iter().enumerate() {
            let table = table_at(subsystem, "namespace", at);
            let Some(hosts) = table.get_mut("allowed-hosts").and_then(Item::as_array_mut) else {
                continue;
            };
            let Some(at) = hosts.iter().position(|entry| entry.as_str() == Some(host)) else {
                continue;
            };
            if hosts.len() == 1 {
                let problem =
                    format!("namespace {nsid} is visible to this host only, expected another host");
                let hint = "delete the namespace first, or set its allowed_hosts";
                return Err(self.refuse(ErrorCode::Failed, problem).with_hint(hint));
            }
            remove_with_comment(hosts, at);
        }
        Ok(())
    }

    /// Sets the keys of a host; `read-only` has two parameters.
    fn set_host_values(&self, entry: &mut InlineTable) {
        self.change_values(entry);
        let listed = self.arguments.texts("read_only_namespaces");
        entry.remove("read-only-namespaces");
        if !listed.is_empty() {
            let nsids = listed.iter().filter_map(|nsid| nsid.parse::<i64>().ok());
            entry.insert("read-only", Value::Array(nsids.collect()));
        } else if self.is_unset("read_only_namespaces") {
            entry.remove("read-only");
        }
    }

    fn edit_listener(&self, document: &mut DocumentMut, bound: &[SocketAddr]) -> EditResult<()> {
        let address = self.text("address");
        let found = find_listener(document, address, bound);
        match (self.kind, found) {
            // Several listeners may have port 0 of one address.
            (MethodKind::Create, Some(_)) if port_of(address) != Some(0) => {
                Err(self.exists(address, "another address"))
            }
            (MethodKind::Create, _) => {
                let mut table = new_table();
                table.insert("address", address.into());
                self.set_values(&mut table);
                array_of_tables(document, "listener").push(table);
                Ok(())
            }
            (_, None) => Err(self.not_found(address, &known_listeners(document, bound))),
            (MethodKind::Delete, Some(at)) => {
                self.remove_listener_of_subsystems(document, at, bound)?;
                remove_table_with_comment(document, &["listener"], &[at]);
                Ok(())
            }
            (_, Some(at)) => {
                self.change_values(table_at(document, "listener", at));
                Ok(())
            }
        }
    }

    /// Removes a listener from the subsystems that name it.
    fn remove_listener_of_subsystems(
        &self,
        document: &mut DocumentMut,
        listener: usize,
        bound: &[SocketAddr],
    ) -> EditResult<()> {
        let all = document.clone();
        let is_it = |value: &Value| {
            value.as_str().is_some_and(|name| find_listener(&all, name, bound) == Some(listener))
        };
        for subsystem in 0..tables(document, "subsystem").len() {
            let table = table_at(document, "subsystem", subsystem);
            let nqn = table.get("nqn").and_then(Item::as_str).unwrap_or_default().to_owned();
            if let Some(names) = table.get_mut("listeners").and_then(Item::as_array_mut) {
                let found = names.iter().position(is_it);
                if found.is_some() && names.len() == 1 {
                    let problem = format!("it is the only listener of {nqn}, expected another one");
                    let hint = format!(
                        "tenmil subsystem set {nqn} --listeners ADDRESS, or --unset listeners"
                    );
                    return Err(self.refuse(ErrorCode::Failed, problem).with_hint(hint));
                }
                if let Some(at) = found {
                    remove_with_comment(names, at);
                }
            }
            let is_path =
                |path: &Table| path.get("listener").and_then(Item::as_value).is_some_and(is_it);
            while let Some(at) = tables(table, "path").iter().position(|path| is_path(path)) {
                array_of_tables(table, "path").remove(at);
            }
        }
        Ok(())
    }

    fn edit_export(&self, document: &mut DocumentMut) -> EditResult<()> {
        let name = self.text("name");
        let found = position_of(tables(document, "export"), "name", name);
        match (self.kind, found) {
            (MethodKind::Create, Some(_)) => Err(self.exists(name, "another name")),
            (MethodKind::Create, None) => {
                let mut table = new_table();
                table.insert("name", name.into());
                table.insert("uri", self.text("uri").into());
                self.set_values(&mut table);
                array_of_tables(document, "export").push(table);
                Ok(())
            }
            (_, None) => Err(self.not_found(name, &names(tables(document, "export"), "name"))),
            (_, Some(at)) => {
                remove_table_with_comment(document, &["export"], &[at]);
                Ok(())
            }
        }
    }

    fn set_ana_state(&self, document: &mut DocumentMut, bound: &[SocketAddr]) -> EditResult<()> {
        let subsystem = self.find_subsystem(document)?;
        let address = self.text("listener");
        let Some(listener) = find_listener(document, address, bound) else {
            return Err(self.not_found(address, &known_listeners(document, bound)));
        };
        let group = self.arguments.integer("ana_group").unwrap_or(1);
        let all = document.clone();
        let name = tables(document, "listener")
            .get(listener)
            .and_then(|table| Some(table.get("address")?.as_str()?.to_owned()));
        let table = table_at(document, "subsystem", subsystem);
        let is_it = |path: &&Table| {
            let at = path.get("listener").and_then(Item::as_str);
            let of = path.get("ana-group").and_then(Item::as_integer).unwrap_or(1);
            at.is_some_and(|at| find_listener(&all, at, bound) == Some(listener))
                && u64::try_from(of) == Ok(group)
        };
        let found = tables(table, "path").iter().position(is_it);
        let state = self.text("state");
        match found {
            Some(at) => set_value(table_at(table, "path", at), "ana-state", state.into()),
            None => {
                let mut path = new_table();
                path.insert("listener", name.as_deref().unwrap_or(address).into());
                if group != 1 {
                    path.insert("ana-group", integer(group).into());
                }
                path.insert("ana-state", state.into());
                array_of_tables(table, "path").push(path);
            }
        }
        Ok(())
    }

    fn find_subsystem(&self, document: &DocumentMut) -> EditResult<usize> {
        let (all, nqn) = (tables(document, "subsystem"), self.text("subsystem"));
        position_of(all, "nqn", nqn).ok_or_else(|| {
            let refusal = self.not_found(nqn, &names(tables(document, "subsystem"), "nqn"));
            refusal.with_hint("create it with `tenmil subsystem create NQN`")
        })
    }

    fn is_unset(&self, parameter: &str) -> bool {
        self.arguments.texts("unset").iter().any(|name| name == parameter)
    }

    /// Sets the keys of a new table in the order of the parameters' names.
    fn set_values(&self, table: &mut dyn TableLike) {
        let named = self.object.identifying();
        for (name, argument) in self.arguments.iter() {
            let is_key =
                !named.contains(&name) && name != "unset" && !table.contains_key(&key_of(name));
            if is_key {
                table.insert(&key_of(name), value_of(argument).into());
            }
        }
    }

    /// Sets the keys that are given, and removes those of `unset`.
    fn change_values(&self, table: &mut dyn TableLike) {
        let named = self.object.identifying();
        for (name, argument) in self.arguments.iter() {
            if !named.contains(&name) && name != "unset" {
                set_value(table, &key_of(name), value_of(argument));
            }
        }
        for name in self.arguments.texts("unset") {
            table.remove(&key_of(name));
        }
    }
}

/// Sets a key and keeps the comment beside its former value.
fn set_value(table: &mut dyn TableLike, key: &str, mut value: Value) {
    if let Some(former) = table.get_mut(key).and_then(Item::as_value_mut) {
        value.decor_mut().clone_from(former.decor());
        *former = value;
    } else {
        table.insert(key, value.into());
    }
}

/// Key of the file for a parameter of a method.
fn key_of(parameter: &str) -> String {
    parameter.replace('_', "-")
}

fn value_of(argument: &Argument) -> Value {
    match argument {
        Argument::Text(text) => text.as_str().into(),
        Argument::Texts(texts) => Value::Array(texts.iter().map(String::as_str).collect()),
        Argument::Flag(flag) => (*flag).into(),
        Argument::Whole(number) => integer(*number),
        Argument::Cores(cores) => cores.to_string().into(),
    }
}

fn integer(number: u64) -> Value {
    i64::try_from(number).unwrap_or(i64::MAX).into()
}

/// A table with an empty line above it.
fn new_table() -> Table {
    let mut table = Table::new();
    table.decor_mut().set_prefix("\n");
    table
}

/// Tables of an array, as `[[key]]` writes them.
fn tables<'a>(parent: &'a Table, key: &str) -> Vec<&'a Table> {
    let found = parent.get(key).and_then(Item::as_array_of_tables);
    found.map(|all| all.iter().collect()).unwrap_or_default()
}

/// The array of tables for a key. One that is written as a list of inline tables is rewritten.
fn array_of_tables<'a>(parent: &'a mut Table, key: &str) -> &'a mut ArrayOfTables {
    let item = parent.entry(key).or_insert_with(|| Item::ArrayOfTables(ArrayOfTables::new()));
    if !item.is_array_of_tables() {
        let rewritten = std::mem::take(item).into_array_of_tables().unwrap_or_default();
        *item = Item::ArrayOfTables(rewritten);
    }
    match item {
        Item::ArrayOfTables(all) => all,
        // It was made one above.
        _ => unreachable!("an array of tables"),
    }
}

/// Table at an index that was found before.
fn table_at<'a>(parent: &'a mut Table, key: &str, at: usize) -> &'a mut Table {
    array_of_tables(parent, key).get_mut(at).expect("an index that was found")
}

fn position_of(all: Vec<&Table>, key: &str, name: &str) -> Option<usize> {
    all.iter().position(|table| table.get(key).and_then(Item::as_str) == Some(name))
}

fn names(all: Vec<&Table>, key: &str) -> Vec<String> {
    let name = |table: &&Table| Some(table.get(key)?.as_str()?.to_owned());
    all.iter().filter_map(name).collect()
}

/// NSIDs of the namespaces of a subsystem in the order of the file, as the checker assigns them.
fn namespace_ids(subsystem: &Table) -> Vec<u64> {
    let mut nsids: Vec<u64> = Vec::new();
    for table in tables(subsystem, "namespace") {
        let own = table.get("nsid").and_then(Item::as_integer);
        let own = own.and_then(|nsid| u64::try_from(nsid).ok());
        let free = || (1..).find(|nsid| !nsids.contains(nsid)).unwrap_or_default();
        nsids.push(own.unwrap_or_else(free));
    }
    nsids
}

/// NQN of an entry of `allowed-hosts`.
fn host_nqn(entry: &Value) -> Option<&str> {
    entry.as_str().or_else(|| entry.as_inline_table()?.get("nqn")?.as_str())
}

/// Entry of `allowed-hosts`: the NQN alone, or a table if the host has keys or rights.
fn host_entry(host: &str, keys: InlineTable) -> Value {
    if keys.is_empty() {
        return host.into();
    }
    let mut entry = InlineTable::new();
    entry.insert("nqn", host.into());
    for (key, mut value) in keys {
        value.decor_mut().clear();
        entry.insert(key, value);
    }
    Value::InlineTable(entry)
}

/// Index of the listener that is configured with an address, or bound to it.
fn find_listener(document: &Table, address: &str, bound: &[SocketAddr]) -> Option<usize> {
    let wanted = parse_address(address)?;
    let all = tables(document, "listener");
    let of = |table: &&Table| parse_address(table.get("address")?.as_str()?);
    let configured = all.iter().position(|table| of(table) == Some(wanted));
    configured.or_else(|| bound.iter().take(all.len()).position(|at| *at == wanted))
}

fn known_listeners(document: &Table, bound: &[SocketAddr]) -> Vec<String> {
    let configured = names(tables(document, "listener"), "address").into_iter().enumerate();
    let shown = |(at, name): (usize, String)| match (port_of(&name), bound.get(at)) {
        (Some(0), Some(bound)) => bound.to_string(),
        _ => name,
    };
    configured.map(shown).collect()
}

fn parse_address(text: &str) -> Option<SocketAddr> {
    text.strip_prefix("tcp://").unwrap_or(text).parse().ok()
}

fn port_of(address: &str) -> Option<u16> {
    Some(parse_address(address)?.port())
}
