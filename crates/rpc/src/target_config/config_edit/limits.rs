//! Edits of rate limits: `limits` of a subsystem, a namespace, a host or an NBD export, and `host-limits`.
//!
//! A rate of 0 removes its key. With the last rate the burst goes too, and the key of the table.

use toml_edit::{Array, DocumentMut, InlineTable, Item, Table, TableLike, Value};

use super::{
    ConfigEdit, ConfigObject, EditResult, host_entry, host_nqn, integer, key_of, names,
    namespace_ids, position_of, push_in_layout, set_value, table_at, tables,
};
use crate::error::ErrorCode;

/// Parameters of rates.
const RATES: [&str; 6] = ["iops", "read_iops", "write_iops", "bytes", "read_bytes", "write_bytes"];

impl ConfigEdit {
    pub(super) fn edit_limits(&self, document: &mut DocumentMut) -> EditResult<()> {
        if self.object == ConfigObject::ExportLimits {
            let export = self.find_or_only(document, "export", "name")?;
            self.change_limits(table_at(document, "export", export), "limits");
            return Ok(());
        }
        let subsystem = self.find_or_only(document, "subsystem", "nqn")?;
        let table = table_at(document, "subsystem", subsystem);
        match (self.object, self.arguments.text("host")) {
            (ConfigObject::NamespaceLimits, _) => {
                let nsid = self.arguments.integer("namespace").unwrap_or_default();
                let nsids = namespace_ids(table);
                let Some(at) = nsids.iter().position(|other| *other == nsid) else {
                    let known: Vec<_> = nsids.iter().map(u64::to_string).collect();
                    return Err(self.not_found(&nsid.to_string(), &known));
                };
                self.change_limits(table_at(table, "namespace", at), "limits");
                Ok(())
            }
            (ConfigObject::HostLimits, Some(host)) => self.change_host_limits(table, host),
            (ConfigObject::HostLimits, None) => {
                self.change_limits(table, "host-limits");
                Ok(())
            }
            _ => {
                self.change_limits(table, "limits");
                Ok(())
            }
        }
    }

    /// Index of the table that the call names by the value of its `key`, or of the only one.
    fn find_or_only(&self, document: &DocumentMut, array: &str, key: &str) -> EditResult<usize> {
        let all = tables(document, array);
        let parameter = if array == "subsystem" { "subsystem" } else { key };
        let Some(name) = self.arguments.text(parameter) else {
            return match all.len() {
                1 => Ok(0),
                _ => {
                    let known = names(all, key);
                    let known = known.iter().map(String::as_str).collect::<Vec<_>>();
                    let known = crate::error::join_alternatives(&known);
                    let problem = format!("no {array} is named, expected {known}");
                    Err(self.refuse(ErrorCode::NotFound, problem))
                }
            };
        };
        let known = || names(tables(document, array), key);
        position_of(all, key, name).ok_or_else(|| self.not_found(name, &known()))
    }

    /// Changes the limits of a host. Where any host may connect, the entry of a host with limits is the only
    /// one that may stand in `allowed-hosts`.
    fn change_host_limits(&self, subsystem: &mut Table, host: &str) -> EditResult<()> {
        let each = subsystem.get("host-limits").and_then(Item::as_table_like).map(rates_of);
        let is_open = subsystem.get("allow-any-host").and_then(Item::as_bool) == Some(true);
        let is_listed = subsystem.contains_key("allowed-hosts");
        if !is_listed && !is_open {
            // A list alone would forbid all other hosts.
            subsystem.insert("allow-any-host", true.into());
        }
        let hosts = subsystem.entry("allowed-hosts").or_insert_with(|| Array::new().into());
        let Some(hosts) = hosts.as_array_mut() else {
            return Err(self.refuse(ErrorCode::Failed, "`allowed-hosts` is no list, expected one"));
        };
        let found = hosts.iter().position(|entry| host_nqn(entry) == Some(host));
        let is_any = is_open || !is_listed;
        if found.is_none() && !is_any {
            let known: Vec<_> = hosts.iter().filter_map(host_nqn).map(str::to_owned).collect();
            let hint = "allow it with `tenmil host create SUBSYSTEM HOST`";
            return Err(self.not_found(host, &known).with_hint(hint));
        }
        let former = found.and_then(|at| hosts.get(at)).and_then(Value::as_inline_table);
        let mut entry = former.cloned().unwrap_or_default();
        entry.remove("nqn");
        // A host without limits of its own has those of each host, which stay beside the new ones.
        if let Some(each) = each.filter(|_| !entry.contains_key("limits")) {
            entry.insert("limits", Value::InlineTable(each));
        }
        self.change_limits(&mut entry, "limits");
        let is_empty = entry.is_empty();
        let mut new = host_entry(host, entry);
        match found {
            Some(at) if is_any && is_empty => super::remove_with_comment(hosts, at),
            Some(at) => {
                if let Some(value) = hosts.get_mut(at) {
                    new.decor_mut().clone_from(value.decor());
                    *value = new;
                }
            }
            None if is_empty => {}
            None => push_in_layout(hosts, new),
        }
        if is_any && hosts.is_empty() {
            subsystem.remove("allowed-hosts");
        }
        Ok(())
    }

    /// Changes the limits that are given in the table at `key`.
    fn change_limits(&self, parent: &mut dyn TableLike, key: &str) {
        if parent.get(key).and_then(Item::as_table_like).is_none() {
            parent.insert(key, Item::Value(Value::InlineTable(InlineTable::new())));
        }
        let Some(limits) = parent.get_mut(key).and_then(Item::as_table_like_mut) else { return };
        for name in RATES {
            match self.arguments.integer(name) {
                Some(0) => drop(limits.remove(&key_of(name))),
                Some(rate) => set_value(limits, &key_of(name), integer(rate)),
                None => {}
            }
        }
        let burst_ms = self.arguments.integer("burst_ms");
        match burst_ms {
            Some(0) => drop(limits.remove("burst")),
            Some(ms) if ms % 1000 == 0 => {
                set_value(limits, "burst", format!("{}s", ms / 1000).into());
            }
            Some(ms) => set_value(limits, "burst", format!("{ms}ms").into()),
            None => {}
        }
        let has_rates = RATES.iter().any(|name| limits.contains_key(&key_of(name)));
        // A burst that is given without any rate stays, so that the check of the text names it.
        if !has_rates && burst_ms.is_none_or(|ms| ms == 0) {
            parent.remove(key);
            return;
        }
        if let Some(Item::Value(Value::InlineTable(limits))) = parent.get_mut(key) {
            limits.fmt();
        }
    }
}

/// A copy of limits as an inline table.
fn rates_of(limits: &dyn TableLike) -> InlineTable {
    let values = limits.iter().filter_map(|(key, item)| Some((key, item.as_value()?.clone())));
    let mut copy: InlineTable = values.collect();
    copy.fmt();
    copy
}
