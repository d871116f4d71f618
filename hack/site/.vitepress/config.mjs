// The site: pages are the Markdown files of the tree. Links to other files of the tree, such as manifests, lead
// to REPOSITORY, the address at which it can be browsed, and are plain text without one.
import { existsSync } from 'node:fs'
import { dirname, join, relative } from 'node:path'
import { defineConfig } from 'vitepress'

const { TREE: tree, REPOSITORY: repository } = process.env
const pages = join(tree, '.run/site-build')
const page = name => ({ text: name[0], link: name[1] })
const section = (text, ...pages) => ({ text, items: pages.map(page) })

// elsewhere returns the path in the tree of a link to a file that is no page; undefined for other links.
function elsewhere(href, source) {
  const path = href.split('#')[0]
  if (!path || path.includes('://') || path.endsWith('.md')) return
  const file = join(dirname(source), path)
  return existsSync(join(tree, file)) ? file : undefined
}

// slug returns the anchor of a heading, as GitHub has it.
const slug = text => text.trim().toLowerCase().replace(/[^\p{L}\p{N}\s_-]/gu, '').replace(/\s/g, '-')

// links lets links between files of the tree lead to where they are on the site.
function links(md) {
  const rule = (tokens, i, options, env, self) => self.renderToken(tokens, i, options)
  const before = md.renderer.rules.link_open ?? rule
  md.renderer.rules.link_open = (tokens, i, options, env, self) => {
    const href = tokens[i].attrGet('href')
    const file = elsewhere(href, relative(pages, env.path))
    if (!file) {
      tokens[i].attrSet('href', href.replace(/(^|\/)README\.md(?=#|$)/, '$1index.md'))
      return before(tokens, i, options, env, self)
    }
    if (repository) tokens[i].attrSet('href', `${repository}/${file}`)
    else tokens[i].attrs = null
    return self.renderToken(tokens, i, options)
  }
}

export default defineConfig({
  title: 'ctrlmesh',
  description: 'A controller mesh for Kubernetes without sidecars',
  base: process.env.BASE ?? '/',
  srcExclude: ['.github/**'],
  outDir: join(tree, '.run/site'),
  rewrites: { 'README.md': 'index.md', ':path(.*)/README.md': ':path/index.md' },
  lastUpdated: false,
  markdown: { config: links, anchor: { slugify: slug } },
  themeConfig: {
    search: { provider: 'local' },
    outline: [2, 3],
    sidebar: [
      section('Start', ['What it is', '/'], ['Index', '/docs/'], ['Try it on one machine', '/docs/try']),
      section('Concepts', ['Concepts', '/docs/concepts'], ['Glossary', '/docs/glossary']),
      section('How to',
        ['Shard an operator', '/docs/shard'], ['Two operators, step by step', '/docs/worked'], ['Roll out a new version', '/docs/rollout'], ['Limit traffic, inject faults', '/docs/traffic'],
        ['Several clusters', '/docs/clusters'], ['Dialects', '/docs/dialects']),
      section('Operate', ['Operations', '/docs/operations'], ['Symptoms by error message', '/docs/symptoms'], ['Security model', '/docs/security']),
      section('Reference', ['Commands', '/docs/commands'], ['Fields', '/docs/fields'], ['Values of the chart', '/docs/values'], ['Metrics', '/docs/metrics']),
      section('Project',
        ['Design', '/docs/design'], ['Operators that were tried', '/docs/operators'], ['What it costs', '/tests/bench/'],
        ['Contributing', '/CONTRIBUTING'], ['Code of conduct', '/CODE_OF_CONDUCT'], ['Security', '/SECURITY'], ['Changelog', '/CHANGELOG'])
    ]
  }
})
